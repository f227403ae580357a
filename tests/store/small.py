"""Small model directories that several test files make, and what they compare."""

from pathlib import Path

import torch
from torch import Tensor, nn

from exssnet import Model
from exssnet.store.stored_model import StoredModel

X = torch.randn(9, 12, generator=torch.Generator().manual_seed(9))
QUICK = {"epochs": (1, 1), "batch_size": 16}


def create(path: Path, **options) -> StoredModel:
    return Model.create(path, "lenet-300-100", **({"input": (12,), "width": 0.05, "density": 0.2} | options))


def examples(number: int, classes: int = 2, rows: int = 48, inputs: int = 12) -> tuple[Tensor, Tensor]:
    """A task that can be learned, another one for every number."""
    draw = torch.Generator().manual_seed(100 + number)
    y = torch.arange(rows) % classes
    return 2 * torch.randn(classes, inputs, generator=draw)[y] + torch.randn(rows, inputs, generator=draw), y


def learn(model: StoredModel, name: str, number: int, classes: int = 2, **options) -> None:
    model.learn(name, examples(number, classes), **(QUICK | options))


def logits(model: StoredModel, x: Tensor = X) -> dict[str, Tensor]:
    """Of all tasks."""
    return {task.name: model.model.logits(x, task.name) for task in model.tasks}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def content(path: Path) -> dict[str, bytes]:
    """All files of a directory but the lock, in which the last writer left its number."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


class Own(nn.Module):
    """A module of a user's own: a frozen part, norms with affine parameters, biases, another name for the head."""

    def __init__(self, inputs: int = 12, hidden: int = 14) -> None:
        super().__init__()
        self.given = nn.Linear(inputs, hidden)
        self.given.requires_grad_(False)
        self.hidden = nn.Linear(hidden, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.classify = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.norm(self.hidden(self.given(x).relu())).relu())
