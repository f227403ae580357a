"""Inputs that do not say their task, asked of a model directory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.small import create, examples

from exssnet import Model
from exssnet.core.routing.rules import RULES, route
from exssnet.store.stored_model import StoredModel

QUICK = {"epochs": (6, 6), "batch_size": 16}


def arrays(file: Path, number: int, spread: float = 1.0, shift: float = 0.0) -> Path:
    """A task's examples in their own units."""
    x, y = examples(number, rows=120)
    np.savez(file, x=(spread * x + shift).numpy(), y=y.numpy())
    return file


@pytest.fixture
def in_own_units(tmp_path: Path) -> StoredModel:
    model = create(tmp_path / "model", width=0.2)
    model.learn("a", arrays(tmp_path / "a.npz", 1), **QUICK)
    model.learn("b", arrays(tmp_path / "b.npz", 2, 50, 300), **QUICK)
    assert model.card("a")["scaling"] != model.card("b")["scaling"]
    return model


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_tasks_that_scale_their_inputs_each_in_its_way(in_own_units: StoredModel, rule: str):
    x = torch.cat([examples(1)[0], 50 * examples(2)[0] + 300])
    scalings = {}
    for name in ("a", "b"):
        mean, std = (torch.tensor(in_own_units.card(name)["scaling"][key]) for key in ("mean", "std"))
        scalings[name] = (1 / std, -mean / std)
    found, wanted = in_own_units.route(x, rule), route(in_own_units.model.network, x, rule, scalings=scalings)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-3, atol=1e-5)
    assert torch.equal(found.choice, wanted.choice)
    assert len(found.choice.unique()) == 2


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_routed_as_they_are(tmp_path: Path, rule: str):
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(20, 16)
            self.hidden, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.hidden(self.embed(x).mean(1)).relu())

    torch.manual_seed(0)
    x, y = torch.randint(0, 20, (64, 6)), torch.arange(64) % 2
    np.savez(tmp_path / "words.npz", x=x.numpy(), y=y.numpy())
    model = Model.create(tmp_path / "model", Words(), input=(6,), density=0.5)
    model.learn("in memory", (x, y), epochs=(1, 1))
    model.learn("file", tmp_path / "words.npz", epochs=(1, 1))
    assert model.route(x, rule).scores.shape == (64, 2)
