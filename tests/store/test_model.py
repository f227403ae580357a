"""A model directory from Python: what is learned today is there, bit for bit, for whoever opens it later."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.store.small import QUICK, Own, X, content, create, examples, learn, logits, same
from torch import nn
from torch.utils.data import TensorDataset

from exssnet import DataError, InputError, Model, StoreError
from exssnet.store.directory import Folder
from exssnet.store.plan import running_low
from exssnet.store.stored_model import StoredModel
from exssnet.store.writer import writing

DIGITS = load_digits()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Low and high digits as raw pixels, learned from files."""
    place = tmp_path_factory.mktemp("digits")
    for name, wanted in (("low", DIGITS.target < 3), ("high", DIGITS.target > 5)):
        np.savez(place / f"{name}.npz", x=DIGITS.images[wanted].astype(np.uint8)[:, None], y=DIGITS.target[wanted])
    model = Model.create(place / "model", "lenet-300-100", input=(1, 8, 8), width=0.3)
    for name in ("low", "high"):
        model.learn(name, place / f"{name}.npz", epochs=(6, 6))
    return place


def test_what_is_learned_from_files_is_told_predicted_evaluated_and_verified(digits: Path):
    model = Model.open(digits / "model")
    low, high = model.tasks
    assert (low.name, low.labels) == ("low", ("0", "1", "2"))
    assert (high.name, high.labels) == ("high", ("6", "7", "8", "9"))
    assert low.examples + low.card["held_out"] == int((DIGITS.target < 3).sum())
    assert (low.lender, low.overlap) == (None, None)
    assert (high.lender, high.overlap > 0) == ("low", True)
    assert low.size == model.manifest.tasks[0].card.size + model.manifest.tasks[0].tensors.size
    assert low.date.startswith("20")
    assert len(low.digest) == 64

    pixels, numbers = DIGITS.images.astype(np.uint8)[:, None], DIGITS.target
    wanted = numbers < 3
    right = model.predict(pixels[wanted], "low").numpy() == numbers[wanted]
    assert right.mean() > 0.9
    assert model.evaluate(digits / "low.npz", "low") == pytest.approx(100 * right.mean())
    assert model.evaluate((pixels[wanted], numbers[wanted]), "low") == pytest.approx(100 * right.mean())
    shares = model.probabilities(pixels[wanted], "low")
    torch.testing.assert_close(shares.sum(1), torch.ones(len(shares)))
    assert model.verify().verified


def test_rows_of_several_tasks_in_one_call_get_their_own_tasks_answers(digits: Path):
    model = Model.open(digits / "model")
    pixels = DIGITS.images.astype(np.uint8)[:40, None]
    tasks = ["low" if row % 3 else "high" for row in range(40)]
    found = model.predict(pixels, tasks=tasks)
    for name in ("low", "high"):
        rows = [row for row, task in enumerate(tasks) if task == name]
        assert torch.equal(found[rows], model.predict(pixels[rows], name))
    assert torch.equal(model.predict(pixels, tasks=["low"] * 40), model.predict(pixels, "low"))
    assert torch.equal(model.predict(torch.from_numpy(pixels), tasks=tasks), found)


def test_questions_that_cannot_be_answered_get_one_line(digits: Path):
    model = Model.open(digits / "model")
    pixels = DIGITS.images.astype(np.uint8)[:3, None]
    for ask, said in [
        (lambda: model.predict(pixels), "give either task, or tasks"),
        (lambda: model.predict(pixels, "low", tasks=["low"] * 3), "give either task, or tasks"),
        (lambda: model.predict(pixels, tasks=["low"] * 2), "2 tasks for 3 inputs"),
        (lambda: model.predict(pixels, tasks=["low", "high", "lwo"]), r"no task 'lwo' \(it has: low, high\)"),
        (lambda: model.predict(pixels, "middle"), "no task 'middle'"),
        (lambda: model.predict(pixels[:, :, :5], "low"), "cannot take inputs of shape"),
        (lambda: model.predict(pixels[:, :, :5], tasks=["low", "high", "low"]), "cannot take inputs of shape"),
        (lambda: model.predict(pixels * np.nan, tasks=["low", "high", "low"]), "input 0 has NaN"),
        (lambda: model.predict(np.array(3), "low"), "give at least one example"),
        (lambda: model.evaluate((pixels, np.array([0, 1, 7])), "low"), "label 7 of example 2"),
    ]:
        with pytest.raises(InputError, match=said):
            ask()


def test_everything_is_there_after_opening_again(tmp_path: Path):
    model = create(tmp_path / "model")
    for number, classes in enumerate((2, 3, 4)):
        learn(model, f"task {number}", number, classes)
    before, facts = logits(model), [task.card for task in model.tasks]
    again = Model.open(tmp_path / "model")
    assert same(logits(again), before)
    assert [task.card for task in again.tasks] == facts
    assert again.verify().tasks.digests == {task.name: task.digest for task in model.model.tasks}
    assert [task.digest for task in again.tasks] == [task.digest for task in model.tasks]
    assert again.summary()["tasks"] == ["task 0", "task 1", "task 2"]
    assert again.base == model.base
    baked = again.bake("task 2")
    assert torch.equal(baked(X), before["task 2"])


def test_learning_goes_on_in_an_opened_directory_as_it_would_have_in_the_one_that_stayed_open(tmp_path: Path):
    stays = create(tmp_path / "a")
    learn(stays, "first", 1)
    learn(create(tmp_path / "b"), "first", 1)
    learn(stays, "second", 2)
    opened = Model.open(tmp_path / "b")
    learn(opened, "second", 2)
    assert same(logits(stays), logits(opened))
    assert [task.digest for task in stays.tasks] == [task.digest for task in opened.tasks]


@pytest.mark.parametrize("kind", ["tensors", "arrays", "dataset"])
def test_examples_in_memory_are_learned_with_the_names_given(tmp_path: Path, kind: str):
    x, y = examples(1, 3)
    data = {"tensors": (x, y), "arrays": (x.double().numpy(), y.numpy()), "dataset": TensorDataset(x, y)}[kind]
    model = create(tmp_path / "model")
    found = model.learn("kinds", data, classes=["a", "b", "c"], **QUICK)
    assert found.labels == ("a", "b", "c")
    assert torch.equal(Model.open(tmp_path / "model").predict(x, "kinds"), model.predict(x, "kinds"))


def test_a_task_can_have_a_density_of_its_own(tmp_path: Path):
    model = create(tmp_path / "model", method="exssnet")
    learn(model, "usual", 1)
    learn(model, "sparse", 2, density=0.05)
    learn(model, "usual again", 3)
    kept = [int(model.model.network.mask(task.name).count_nonzero()) for task in model.tasks]
    size = model.model.network.layout.size
    assert [share / size for share in kept] == pytest.approx([0.2, 0.05, 0.2], abs=0.02)
    assert [task.card["settings"]["density"] for task in model.tasks] == [0.2, 0.05, 0.2]


def test_a_warning_comes_when_less_than_a_quarter_of_the_weights_is_free(tmp_path: Path):
    model = create(tmp_path / "model", method="exssnet")
    learn(model, "half", 1, density=0.5)
    assert running_low(model.model.network) is None
    learn(model, "most", 2, density=0.7)
    assert "% of the weights are free, and new tasks will mostly use trained ones" in running_low(model.model.network)


# --- Failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("first", examples(1), {}),  # taken
        ("one class", (X, torch.zeros(9, dtype=torch.int64)), {}),
        ("shape", (torch.randn(8, 5), torch.arange(8) % 2), {}),
        ("labels", (X, torch.arange(9) - 1), {}),
        ("names", examples(1, 3), {"classes": ["a", "b"]}),
        ("density", examples(1), {"density": 2.0}),
        ("rate", examples(1), {"lr": -1.0}),
        ("optimizer", examples(1), {"optimizer": "adamm"}),
        ("share", examples(1), {"held_out": 1.0}),
        ("epochs", examples(1), {"epochs": (0, 1)}),
        ("file", "nowhere.npz", {}),
    ],
)
def test_a_task_that_cannot_be_learned_leaves_the_directory_and_the_model_as_they_were(
    tmp_path: Path, name: str, data, options
):
    model = create(tmp_path / "model")
    learn(model, "first", 1)
    before, files = logits(model), content(tmp_path / "model")
    with pytest.raises((InputError, DataError)):
        model.learn(name, data, **(QUICK | options))
    assert content(tmp_path / "model") == files
    assert same(logits(model), before)
    learn(model, "second", 2)
    assert model.verify().verified


@pytest.mark.parametrize("name", ["", " a", "a ", "a/b", "a\\b", "a,b", "auto", "x" * 101, "a\nb", "\x1b[31m", 7])
def test_a_name_that_would_be_hard_to_type_or_show_is_refused(tmp_path: Path, name):
    model = create(tmp_path / "model")
    with pytest.raises(InputError, match="cannot be the name of a task"):
        model.learn(name, examples(1))
    learn(model, "good", 1)
    with pytest.raises(InputError, match="cannot be the name of a task"):
        model.rename("good", name)


def test_a_directory_that_another_writer_holds_is_not_changed(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "a", 1)
    with writing(Folder(tmp_path / "model")):
        for change in (
            lambda: learn(model, "b", 2), lambda: model.rename("a", "b"), lambda: model.remove("a"), model.rollback,
        ):  # fmt: skip
            with pytest.raises(StoreError, match="is in use by process"):
                change()
        assert Model.open(tmp_path / "model").verify().verified  # reading needs no lock
    learn(model, "b", 2)


def test_a_new_model_is_never_made_where_something_else_is(tmp_path: Path):
    create(tmp_path / "model")
    with pytest.raises(StoreError, match="is already a model directory"):
        create(tmp_path / "model")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_text("a photo")
    with pytest.raises(StoreError, match="has other files and is not a model directory"):
        create(tmp_path / "photos")
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["a.jpg"]
    with pytest.raises(StoreError, match=r"not a model directory: it has no manifest\.json"):
        Model.open(tmp_path / "photos")
    for options, said in [
        ({"input": ()}, "give the shape of one example"), ({"init": "keep"}, "needs your own module"),
        ({"method": "hat"}, "cannot be stored"), ({"density": 0}, "density is 0"), ({"width": -1}, "width"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=said):
            create(tmp_path / "new", **options)
        assert not (tmp_path / "new").exists()


# --- A network of the user's own -----------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["keep", "hashed"])
@pytest.mark.parametrize("private", [(), ("norm", "bias")])
def test_a_module_of_one_s_own_comes_back_whatever_weights_the_module_passed_has(tmp_path: Path, init, private):
    torch.manual_seed(1)
    model = Model.create(tmp_path / "model", Own(), input=(12,), density=0.2, init=init, private=private)
    for number, classes in enumerate((2, 4)):
        learn(model, f"task{number}", number, classes)
    before = logits(model)
    torch.manual_seed(2)
    again = Model.open(tmp_path / "model", Own())
    assert same(logits(again), before)
    assert again.verify().verified
    learn(again, "third", 3)
    assert again.remove("task0").freed > 0
    assert torch.equal(Model.open(tmp_path / "model", Own()).model.logits(X, "task1"), before["task1"])
    assert torch.equal(again.bake("task1")(X), before["task1"])


def test_a_module_of_one_s_own_has_to_be_passed_again_and_has_to_be_the_same(tmp_path: Path):
    model = Model.create(tmp_path / "model", Own(), input=(12,), density=0.2)
    learn(model, "a", 1)
    without = Model.open(tmp_path / "model")
    assert [task.name for task in without.tasks] == ["a"]
    with pytest.raises(InputError, match="your own network: pass the module"):
        without.predict(X, "a")
    report = without.verify()  # every byte, but not the tasks
    assert (report.verified, report.tasks) == (True, None)
    for other in (Own(hidden=15), nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 2))):
        with pytest.raises(StoreError, match=r"differs from the one the model was created with: it has .*, the model"):
            Model.open(tmp_path / "model", other).predict(X, "a")
    without.rename("a", "b")
    assert Model.open(tmp_path / "model", Own()).predict(X, "b").shape == (9,)
    learn(create(tmp_path / "built in"), "a", 1)
    with pytest.raises(InputError, match="has the built-in network lenet-300-100"):
        Model.open(tmp_path / "built in", Own()).predict(X, "a")


def test_opening_never_imports_what_a_directory_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    learn(create(tmp_path / "model"), "a", 1)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n\ndef make():\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = Folder(tmp_path / "model")
    named = replace(folder.manifest(), base=dict(folder.manifest().base) | {"network": "evil:make"})
    (tmp_path / "model/manifest.json").write_bytes(named.content())
    with pytest.raises(StoreError, match="has the network 'evil:make', which this version does not have"):
        Model.open(tmp_path / "model").predict(X, "a")
    with pytest.raises(StoreError):
        Model.open(tmp_path / "model").verify()
    assert not (tmp_path / "ran").exists()
    assert "evil" not in sys.modules


# --- Several who look at one directory -----------------------------------------------------------------------


def test_a_change_starts_from_what_is_on_disk_now(tmp_path: Path):
    one = create(tmp_path / "model")
    learn(one, "a", 1)
    other = Model.open(tmp_path / "model")
    learn(other, "b", 2)
    learn(one, "c", 3)
    assert [task.name for task in one.tasks] == ["a", "b", "c"]
    one.remove("a")
    with pytest.raises(InputError, match="has no task 'a'"):
        other.rename("a", "d")
    with pytest.raises(InputError, match="has no task 'a'"):
        Model.open(tmp_path / "model").remove("a")
    assert Model.open(tmp_path / "model").verify().verified


def test_whoever_opened_a_directory_before_it_changed_is_told_or_sees_one_whole_state(tmp_path: Path):
    writer = create(tmp_path / "model")
    learn(writer, "a", 1)
    fresh, told = StoredModel.open(tmp_path / "model"), StoredModel.open(tmp_path / "model")
    assert [task.name for task in told.tasks] == ["a"]
    before = logits(writer)
    learn(writer, "b", 2)
    assert same(logits(Model.open(tmp_path / "model")) | before, logits(writer))
    writer.remove("a")
    writer.rename("b", "c")
    assert [task.name for task in fresh.tasks] == ["c"]  # had told nothing yet
    with pytest.raises(StoreError, match="has changed since it was read: open it again"):
        told.predict(X, "a")


def test_the_summary_is_json_and_says_what_was_done_last(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "a", 1)
    told = json.loads(json.dumps(model.summary()))
    assert (told["changes"], told["last_change"], told["tasks"]) == (1, "learn a", ["a"])
    assert told["base"]["network"] == "lenet-300-100"
