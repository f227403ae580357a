"""Small networks and streams that several test files learn."""

import torch
from torch import Tensor, nn

from exssnet.data import Task, as_data


def mlp(classes: int = 2, inputs: int = 12, hidden: int = 40) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.ReLU(),
        nn.Linear(hidden, hidden, bias=False),
        nn.BatchNorm1d(hidden, affine=False),
        nn.ReLU(),
        nn.Linear(hidden, classes, bias=False),
    )


class Transformer(nn.Module):
    """Tokens in, classes out: embeddings, positions, attention, layer norm with affine parameters, biases, dropout."""

    def __init__(self, classes: int = 2, words: int = 20, size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.position = nn.Parameter(torch.randn(1, 8, size))
        layer = nn.TransformerEncoderLayer(size, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classify(self.encoder(self.embedding(tokens) + self.position).mean(1))


def examples(number: int, rows: int = 96, inputs: int = 12, classes: int = 2) -> tuple[Tensor, Tensor]:
    """A learnable task, different for every number: classes around their own centres."""
    draw = torch.Generator().manual_seed(1000 + number)
    centres = 2 * torch.randn(classes, inputs, generator=draw)
    y = torch.arange(rows) % classes
    return centres[y] + torch.randn(rows, inputs, generator=draw), y


def tokens(rows=48):
    y = torch.arange(rows) % 2
    return torch.randint(0, 10, (rows, 8), generator=torch.Generator().manual_seed(0)) + 10 * y[:, None], y


def task(number: int, **sizes: int) -> Task:
    data = as_data(examples(number, **sizes))
    return Task(number, f"task-{number}", tuple(range(data.classes)), data, data)
