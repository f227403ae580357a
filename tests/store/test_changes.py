"""Tasks come and go in any order: those that stay are, bit for bit, what they were when they were learned."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.store.small import X, content, create, learn, logits, same

from exssnet import InputError, Model, StoreError

NAMES = st.sampled_from(["a", "b", "c", "d e", "ü"])


class Years(RuleBasedStateMachine):
    """A directory over the years, beside a plain list of what it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.model = create(self.place / "model", density=0.3)
        self.tasks: dict[str, torch.Tensor] = {}  # what it should hold: logits, as they were learned
        self.before: dict[str, torch.Tensor] | None = None  # what a rollback gives; None: there is nothing to undo

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    def changed(self, tasks: dict[str, torch.Tensor]) -> None:
        self.before, self.tasks = self.tasks, tasks

    @rule(name=NAMES, number=st.integers(0, 50), classes=st.integers(2, 4), density=st.sampled_from([None, 0.1, 0.6]))
    def learn(self, name: str, number: int, classes: int, density: float | None) -> None:
        if name in self.tasks:
            with pytest.raises(InputError, match="exists"):
                learn(self.model, name, number, classes)
            return
        learn(self.model, name, number, classes, density=density)
        self.changed(self.tasks | {name: self.model.model.logits(X, name)})

    @rule(task=st.sampled_from(["guest0", "guest1"]), name=NAMES)
    def take_in(self, task: str, name: str) -> None:
        """A task from elsewhere, whose weights may be other tasks' here."""
        if not (self.place / "home").exists():
            home = create(self.place / "home", density=0.4)
            for number in range(2):
                learn(home, f"guest{number}", 70 + number, 2 + number)
        home = Model.open(self.place / "home")
        if name in self.tasks:
            with pytest.raises(InputError, match="has been learned already"):
                self.model.import_task(home, task, name)
            return
        self.model.import_task(home, task, name)
        self.changed(self.tasks | {name: home.model.logits(X, task)})

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.tasks)))
        self.model.remove(name)
        self.changed({other: found for other, found in self.tasks.items() if other != name})

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), to=NAMES)
    def rename(self, data: st.DataObject, to: str) -> None:
        name = data.draw(st.sampled_from(list(self.tasks)))
        if to in self.tasks:
            with pytest.raises(InputError, match="exists: choose another name"):
                self.model.rename(name, to)
            return
        self.model.rename(name, to)
        self.changed({to if other == name else other: found for other, found in self.tasks.items()})

    @rule()
    def rollback(self) -> None:
        if self.before is None:
            with pytest.raises(StoreError, match=r"no change to undo"):
                self.model.rollback()
            return
        self.model.rollback()
        self.tasks, self.before = self.before, None

    @rule()
    def open(self) -> None:
        self.model = Model.open(self.place / "model")

    @invariant()
    def holds_what_was_learned(self) -> None:
        assert [task.name for task in self.model.tasks] == list(self.tasks)
        assert same(logits(self.model), self.tasks)
        again = Model.open(self.place / "model")
        assert same(logits(again), self.tasks)
        assert again.verify().verified
        assert torch.equal(again.model.network.weights, self.model.model.network.weights)
        known = {*self.tasks, None}
        assert all(task.lender in known for task in again.tasks)
        if self.tasks:
            names = [name for name in self.tasks for _ in range(2)]
            mixed = self.model.predict(X[: len(names)], tasks=names[: len(X)])
            wanted = [int(self.tasks[name][row].argmax()) for row, name in enumerate(names[: len(X)])]
            assert mixed.tolist() == wanted[: len(X)]


Years.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestYears = pytest.mark.slow(Years.TestCase)


# --- Removing ------------------------------------------------------------------------------------------------


@pytest.fixture
def four(tmp_path: Path):
    """Four tasks; each but the first started from another one's mask."""
    model = create(tmp_path / "model", density=0.3)
    for number in range(4):
        learn(model, f"task{number}", number, 2 + number % 2)
    assert model.tasks[1].lender == "task0"
    return model


@pytest.mark.parametrize("gone", range(4))
def test_removing_frees_what_no_other_task_reads_and_takes_its_bytes_off_the_disk(four, gone: int):
    first = create(four.path.parent / "fresh").model.network.weights
    network = four.model.network
    masks = {name: network.mask(name) for name in network.tasks}
    weights, wanted, digests = network.weights.clone(), logits(four), {task.name: task.digest for task in four.tasks}
    size, free = four.summary()["bytes"], network.bank.free_count
    name = f"task{gone}"
    removed = four.remove(name)
    earlier = [mask for other, mask in masks.items() if other < name]
    trained = masks[name] & (weights != first)
    for mask in earlier:
        trained &= ~mask
    del masks[name], wanted[name], digests[name]
    read = [any(mask[place] for mask in masks.values()) for place in range(len(weights))]
    for model in (four, Model.open(four.path)):
        found = model.model.network
        assert torch.equal(found.weights, torch.where(torch.tensor(read), weights, first))
        assert found.bank.used.tolist() == read
        assert same(logits(model), wanted)
        assert {task.name: task.digest for task in model.tasks} == digests
        assert name not in [task.lender for task in model.tasks]
        assert model.verify().verified
    assert removed.freed == len(read) - sum(read) - free
    assert removed.staying == sum(map(int, trained & torch.tensor(read)))
    assert removed.staying > 0 or gone > 0
    assert removed.undoable
    assert four.summary()["bytes"] < size
    trained = four.model.network.bank.free_count
    learn(four, "new", 9)
    assert four.model.network.bank.free_count < trained
    assert same({task: four.model.logits(X, task) for task in wanted}, wanted)


def test_a_removed_task_leaves_nothing_on_the_disk_once_it_can_no_longer_be_brought_back(four):
    removed = four.manifest.tasks[2]
    assert removed.name == "task2"
    four.remove("task2")
    assert {removed.card.name, removed.tensors.name} <= {file.name for file in (four.path / "files").iterdir()}
    four.rename("task3", "last")
    on_disk = {file.name for file in (four.path / "files").iterdir()}
    assert not on_disk & {removed.card.name, removed.tensors.name}
    assert {file.name for file in four.manifest.files()} < on_disk


def test_removing_all_tasks_gives_the_model_of_the_first_day(four):
    before = create(four.path.parent / "fresh").model.network.weights
    for task in ("task1", "task3", "task0", "task2"):
        four.remove(task)
    assert torch.equal(four.model.network.weights, before)
    assert four.model.free == 1.0
    learn(four, "task0", 0)
    other = create(four.path.parent / "other", density=0.3)
    learn(other, "task0", 0)
    assert same(logits(four), logits(other))


def test_a_rollback_brings_back_the_very_files(four):
    before, wanted = content(four.path), logits(four)
    four.remove("task1")
    assert four.rollback() == "remove task1"
    found = content(four.path)
    assert found["manifest.json"] == before["manifest.json"]
    assert {file.name for file in four.manifest.files()} <= {Path(name).name for name in found}
    assert same(logits(four), wanted)
    with pytest.raises(StoreError, match="no change to undo"):
        four.rollback()
    four.rename("task0", "zero")
    assert four.rollback() == "rename task0 to zero"


def test_a_model_without_a_change_has_nothing_to_undo(tmp_path: Path):
    with pytest.raises(StoreError, match="no change to undo"):
        create(tmp_path / "model").rollback()


def test_a_task_with_the_name_of_a_removed_one_does_not_inherit_its_lender(tmp_path: Path):
    model = create(tmp_path / "model", density=0.3)
    learn(model, "first", 0)
    learn(model, "name", 1)
    assert model.task("name").lender == "first"
    for task in ("first", "name"):
        model.remove(task)
    learn(model, "name", 1)
    assert model.task("name").lender is None


def test_renaming_keeps_who_started_from_whose_mask(four):
    four.rename("task0", "root")
    assert "root" in [task.lender for task in four.tasks]
    assert "task0" not in [task.lender for task in four.tasks]
    assert four.tasks[0].digest == Model.open(four.path).task("root").digest
    learn(four, "task0", 7)  # the name is free again
    assert four.verify().verified
