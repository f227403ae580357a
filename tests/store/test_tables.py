"""A new model directory for a table learns what any small network with biases learns, with the defaults."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, make_circles
from tests.store.small import create, examples, learn, logits, same
from tests.store.tamper import rewrite

from exssnet import Model
from exssnet.errors import InputError
from exssnet.models import build
from exssnet.store.learning import usual_epochs
from exssnet.store.stored_model import StoredModel


def table(file: Path, x: np.ndarray, y: np.ndarray) -> Path:
    header = [*(f"column {number}" for number in range(x.shape[1])), "label"]
    rows = [[*map(repr, map(float, row)), f"kind {label}"] for row, label in zip(x, y, strict=True)]
    file.write_text("\n".join(",".join(cells) for cells in (header, *rows)) + "\n")
    return file


def circles(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return make_circles(400, noise=0.05, factor=0.5, random_state=seed)


def three_ranges(seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).uniform(0, 3, (400, 1))
    return x, x[:, 0].astype(int)


def iris(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return load_iris(return_X_y=True)  # the same rows again: of 30 fresh ones any network gets one or two wrong


@pytest.mark.parametrize("of", [circles, three_ranges, iris])
def test_simple_tables_are_learned_with_the_defaults(tmp_path: Path, of):
    learned, asked = table(tmp_path / "learned.csv", *of(0)), table(tmp_path / "asked.csv", *of(1))
    model = Model.create(tmp_path / "model", input=(of(0)[0].shape[1],))
    model.learn("a", learned, label="label")
    assert model.evaluate(asked, "a") > 95


def private(model: StoredModel, task: str) -> dict[str, torch.Tensor]:
    return model.model.network.task(task).private


def test_each_task_of_a_table_has_biases_of_its_own(tmp_path: Path):
    model = Model.create(tmp_path / "model", input=(12,))
    assert (model.base.network, model.base.private) == ("mlp", ("bias",))
    learn(model, "a", 1)
    before = logits(model)
    learn(model, "b", 2, classes=3)
    assert same(logits(model) | before, logits(model))
    names = {"hidden.1.bias", "hidden.3.bias", "head.bias", "head.weight"}
    for task in ("a", "b"):
        assert private(model, task).keys() == names
        assert all(tensor.any() for tensor in private(model, task).values())
    assert not torch.equal(private(model, "a")["hidden.1.bias"], private(model, "b")["hidden.1.bias"])
    assert same(logits(Model.open(tmp_path / "model")), logits(model))


@pytest.mark.parametrize("kind", ["in memory", "on disk"])
def test_biases_are_learned_in_both_phases(tmp_path: Path, kind: str):
    def bias(*epochs: int) -> torch.Tensor:
        if kind == "on disk":
            model = Model.create(tmp_path / f"{epochs}", input=(12,), method="exssnet")
            learn(model, "a", 1, epochs=epochs)
            return private(model, "a")["hidden.1.bias"]
        module = build("mlp", (12,), 2)
        plain = Model(module, method="exssnet", private=("bias",), head="task")
        return plain.learn("a", examples(1), epochs=epochs).private["hidden.1.bias"]

    first, both = bias(1, 0), bias(1, 1)
    assert first.any()
    assert not torch.equal(first, both)  # the first phase is the same, so the second one moved them


def test_other_networks_and_other_private_tensors_can_be_had_for_tables(tmp_path: Path):
    assert Model.create(tmp_path / "a", "lenet-300-100", input=(12,)).base.private == ()
    model = Model.create(tmp_path / "b", input=(12,), private=())
    learn(model, "a", 1)
    assert private(model, "a").keys() == {"head.bias", "head.weight"}


@pytest.mark.parametrize(("word", "what"), [("bias", "no bias"), ("norm", "no norm layer"), ("x.*", "no parameter")])
def test_private_tensors_that_the_network_does_not_have_are_refused(tmp_path: Path, word: str, what: str):
    with pytest.raises(InputError, match=f"private '{word[0]}.*{what}"):
        create(tmp_path / "model", private=(word,))
    assert not (tmp_path / "model").exists()
    with pytest.raises(InputError, match=f"private '{word[0]}.*{what}"):
        Model(torch.nn.Sequential(torch.nn.Linear(12, 2, bias=False)), private=(word,))


def test_a_directory_that_recorded_such_a_word_still_opens(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "a", 1)
    rewrite(tmp_path / "model", lambda found: found["base"].update(private=["bias", "norm"]))
    again = Model.open(tmp_path / "model")
    assert again.base.private == ("bias", "norm")
    assert same(logits(again), logits(model))
    learn(again, "b", 2)
    assert again.verify().verified


@pytest.mark.parametrize(
    ("shape", "rows", "batch", "each"),
    [((4,), 120, 8, 50), ((4,), 4000, 64, 24), ((4,), 100_000, 64, 15), ((1, 8, 8), 120, 8, 15)],
)
def test_a_table_of_few_rows_gets_more_epochs(shape: tuple[int, ...], rows: int, batch: int, each: int):
    assert usual_epochs(shape, rows, batch) == (each, each)


def test_a_card_says_how_many_epochs_there_were(tmp_path: Path):
    model = Model.create(tmp_path / "model", input=(12,), width=0.05)
    x, y = examples(1)
    assert model.learn("a", (x, y)).card["settings"]["epochs"] == [50, 50]
