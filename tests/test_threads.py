"""Threads ask a model while another one learns on it: every answer is right, and nothing is refused."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.core.networks import mlp
from torch import Tensor, nn

from exssnet import Model
from exssnet.core import changes

PREDICTIONS = 2000


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Change between threads a hundred times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 100)
    yield
    sys.setswitchinterval(usual)


def examples(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(48, *shape, generator=torch.Generator().manual_seed(0))
    return x, (x.flatten(1).mean(1) > 0.5).long()


def ask_while(change: Callable[[int], object], changes: int, *asked: Callable[[], bool]) -> None:
    """Ask from threads, all the while changes are made, at least so often in all."""
    stop, wrong, count = threading.Event(), [], [0] * len(asked)

    def ask(number: int) -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            try:
                if not asked[number]():
                    wrong.append((number, "another answer"))
            except Exception as error:
                wrong.append((number, repr(error)))
            count[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    try:
        for thread in threads:
            thread.start()
        made = 0
        while not wrong and (made < changes or sum(count) < PREDICTIONS):
            change(made)
            made += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert all(count)


def test_a_model_is_asked_and_verified_while_it_learns():
    data = examples(12)
    model = Model(mlp(), density=0.1)
    for name in "ab":
        model.learn(name, data, epochs=(1, 1))
    expected = {name: model.logits(data[0], name) for name in "ab"}
    baked = model.bake("a")
    ask_while(
        lambda number: model.learn(f"n{number}", data, epochs=(1, 1)),
        10,
        lambda: torch.equal(model.logits(data[0], "a"), expected["a"]),
        lambda: torch.equal(model.logits(data[0], "b"), expected["b"]),
        lambda: model.verify().verified,
        lambda: torch.equal(model.bake("a").state_dict()["0.weight"], baked.state_dict()["0.weight"]),
    )


@pytest.mark.parametrize("network", ["lenet-300-100", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_a_model_directory_is_asked_and_exported_from_while_it_learns(tmp_path: Path, network: str):
    x, y = examples(3, 8, 8)
    model = Model.create(tmp_path / "model", network, (3, 8, 8), width=4 if network == "resnet18" else 0.1, density=0.3)
    for name, labels in (("a", y), ("b", 1 - y)):
        model.learn(name, (x, labels), epochs=(1, 1))
    expected = {name: model.predict(x, name) for name in "ab"}
    rows = ["a", "b"] * 24
    mixed = torch.where(torch.arange(48) % 2 == 0, expected["a"], expected["b"])
    ask_while(
        lambda number: model.learn(f"n{number}", (x, y), epochs=(1, 1)),
        4,
        lambda: torch.equal(model.predict(x, "a"), expected["a"]),
        lambda: torch.equal(model.predict(x, "b"), expected["b"]),
        lambda: torch.equal(model.predict(x, tasks=rows), mixed),
        lambda: len(model.predict(x[:4], task="auto").tasks) == 4,
        lambda: [task.name for task in model.tasks][:2] == ["a", "b"],
        lambda: torch.equal(model.bake("a")(x).argmax(1), expected["a"]),
        lambda: model.verify().verified,
    )


def test_weights_that_no_task_uses_may_change_while_one_answers():
    meanwhile: list[Callable[[], object]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(12, 30), nn.Linear(30, 2)

        def forward(self, x: Tensor) -> Tensor:
            while meanwhile:
                meanwhile.pop()()
            return self.head(self.body(x).relu())

    data = examples(12)
    model = Model(Watched(), density=0.3)
    model.learn("a", data, epochs=(1, 1))
    expected = model.logits(data[0], "a")
    network = model.network
    meanwhile.append(lambda: network.weights.masked_fill_(~network.bank.used, 1.0))  # as another thread does
    assert torch.equal(model.logits(data[0], "a"), expected)
    assert meanwhile == []


class InTheMiddle:
    """Has another thread ask once when a step of a change is done; it is given time, and may wait for the whole."""

    def __init__(self, holder: object, step: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        self._step, self._found = getattr(holder, step), list[object]()
        self._thread = threading.Thread(target=lambda: self._found.append(ask()))
        self._started = False
        monkeypatch.setattr(holder, step, self._stepped)

    def _stepped(self, *args: object) -> object:
        result = self._step(*args)
        if not self._started:
            self._started = True
            self._thread.start()
            self._thread.join(0.5)
        return result

    def answer(self) -> object:
        self._thread.join()
        return self._found[0]


def test_nobody_sees_half_of_a_task_that_is_added_or_removed(monkeypatch: pytest.MonkeyPatch):
    data = examples(12)
    model = Model(mlp(), density=0.1)
    for name in "ab":
        model.learn(name, data, epochs=(1, 1))
    first = model.network.weights.clone()
    expected = model.logits(data[0], "b")
    verified = InTheMiddle(model.network.proof, "stored_digest", lambda: model.verify().changed, monkeypatch)
    model.learn("c", data, epochs=(1, 1))
    assert verified.answer() == ()
    asked = InTheMiddle(model.network.bank, "remove", lambda: model.logits(data[0], "b"), monkeypatch)
    model.network.cache.clear()
    changes.remove(model.network, "a", first)
    assert torch.equal(asked.answer(), expected)


def test_what_is_told_of_a_directory_is_of_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = Model.create(tmp_path / "model", "lenet-300-100", (12,), width=0.1)
    for name in "ab":
        model.learn(name, examples(12), epochs=(1, 1))
    digests = {task.name: task.digest for task in model.tasks}
    model = Model.open(tmp_path / "model")
    removed = InTheMiddle(model, "_read_cards", lambda: model.remove("a"), monkeypatch)
    told = {task.name: task.digest for task in model.tasks}
    assert removed.answer()
    assert told.items() <= digests.items()
    assert {task.name: task.digest for task in model.tasks} == {"b": digests["b"]}
