"""A module that computes something else than the tasks were learned with is told, though its tensors are the same."""

import base64
import copy
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.networks import Transformer, tokens
from tests.store.small import QUICK, create, examples, learn
from tests.store.tamper import rewrite_card
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from exssnet import InputError, Model, StoreError
from exssnet.cli.main import app
from exssnet.store.directory import Folder
from exssnet.store.format.probe import minstd
from exssnet.store.stored_model import StoredModel
from exssnet.store.verify import verify

IMAGES = torch.rand(24, 1, 9, 9, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 2


class Net(nn.Module):
    """Convolutions whose ways to compute can be exchanged; the tensors are the same in all."""

    def __init__(
        self, activation: nn.Module | None = None, pool: nn.Module | None = None, padding: str = "zeros",
        stride: int = 1, between: nn.Module | None = None, eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.one = nn.Conv2d(1, 6, 3, padding=1, padding_mode=padding, stride=stride)
            self.norm = nn.BatchNorm2d(6, eps=eps)
            self.activation = activation or nn.ReLU()
            self.two = nn.Conv2d(6, 8, 3)
            self.between = between or nn.Identity()
            self.pool = pool or nn.AdaptiveMaxPool2d(1)
            self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.activation(self.norm(self.one(x))))
        return self.head(self.pool(self.activation(self.two(x))).flatten(1))


class Noise(nn.Module):
    """Dropout that nobody turns off."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=True)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "Sigmoid": lambda: Net(nn.Sigmoid()),
    "LeakyReLU": lambda: Net(nn.LeakyReLU()),
    "padding": lambda: Net(padding="reflect"),
    "stride": lambda: Net(stride=2),
    "average": lambda: Net(pool=nn.AdaptiveAvgPool2d(1)),
    "dropout in evaluation": lambda: Net(between=Noise()),
    "another activation more": lambda: Net(between=nn.Tanh()),
    "eps of the norm": lambda: Net(eps=1e-2),
    "fails": lambda: Net(stride=9),
}
ALIKE: dict[str, Callable[[], nn.Module]] = {
    "the same": Net,
    "in place": lambda: Net(nn.ReLU(inplace=True)),
    "dropout in training": lambda: Net(between=nn.Dropout(0.9)),
    "in double": lambda: Net().double(),
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "model"
    model = Model.create(path, Net(), input=(1, 9, 9), density=0.5)
    for name, shift in (("a", 0), ("b", 1)):
        model.learn(name, (IMAGES, (LABELS + shift) % 2), **QUICK)
    return path


@pytest.mark.parametrize("kind", OTHERS)
def test_another_module_with_the_same_tensors_is_refused_when_opened_and_by_verify(learned: Path, kind: str):
    with pytest.raises(StoreError, match="the module does not compute what task 'a' was learned with") as error:
        Model.open(learned, OTHERS[kind]())
    assert "pass the module that it was learned with" in str(error.value)
    assert "\n" not in str(error.value)
    problems = verify(Folder(learned), OTHERS[kind]()).problems
    assert [problem.tasks for problem in problems] == [("a",), ("b",)]
    assert all("the module does not compute what task" in str(problem) for problem in problems)


@pytest.mark.parametrize("kind", ALIKE)
def test_a_module_that_computes_the_same_is_taken(learned: Path, kind: str):
    assert verify(Folder(learned), ALIKE[kind]()).verified
    assert len(Model.open(learned, ALIKE[kind]()).predict(IMAGES, "b")) == len(IMAGES)


def test_the_command_tells_it_and_fails(learned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nets.py").write_text(
        "from tests.store.test_probe import Net, nn\n"
        "def right():\n    return Net()\n"
        "def wrong():\n    return Net(nn.Sigmoid())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["verify", str(learned), "--network", "nets:right"]).exit_code == 0
    found = runner.invoke(app, ["verify", str(learned), "--network", "nets:wrong"])
    assert found.exit_code == 1
    assert "does not compute what task 'b' was learned with" in " ".join(found.output.split())


# --- What is kept -------------------------------------------------------------------------------------------------


def plain_inputs(rows: int, shape: tuple[int, ...], below: int | None) -> np.ndarray:
    """As docs/reference/format.md has it, in Python's whole numbers."""
    numbers, last = [], 1
    for _ in range(rows * int(np.prod(shape))):
        last = last * 48271 % 2147483647
        numbers.append(last)
    made = [number // 32768 / 16384 - 2 if below is None else number % below for number in numbers]
    return np.array(made).reshape(rows, *shape)


def kept(probe: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(probe["answers"]), "<f4")


def test_a_second_reader_finds_the_same_answers_and_digest(learned: Path):
    model = Model.open(learned, Net())
    for task in model.tasks:
        probe = task.card["probe"]
        x = plain_inputs(probe["rows"], tuple(probe["shape"]), probe["below"])
        assert -2 <= x.min() < -1.9
        assert 1.9 < x.max() < 2
        with torch.no_grad():
            found = model.model.bake(task.name).double()(torch.from_numpy(x)).float().numpy()
        assert probe["precision"] == "float64"
        assert np.array_equal(found.reshape(-1), kept(probe))
        text = f"torch.float32 {found.shape} ".encode()
        assert probe["digest"] == hashlib.sha256(text + found.astype("<f4").tobytes()).hexdigest()


def test_indices_are_those_that_were_learned(tmp_path: Path):
    torch.manual_seed(0)
    module = Transformer()
    model = Model.create(tmp_path / "model", module, input=(8,), density=0.3)
    model.learn("words", tokens(), **QUICK)
    probe = model.card("words")["probe"]
    x = plain_inputs(probe["rows"], (8,), probe["below"]).astype(np.int64)
    assert probe["below"] == 20
    assert len(set(x.reshape(-1).tolist()) & set(range(20))) > 15
    assert x.max() < 20
    other = copy.deepcopy(module)
    for layer in other.encoder.layers:
        layer.norm_first = True
    with pytest.raises(StoreError, match="does not compute what task 'words'"):
        Model.open(tmp_path / "model", other)
    assert Model.open(tmp_path / "model", module).verify().verified


def test_many_answers_and_large_inputs_are_kept_in_part(tmp_path: Path):
    model = create(tmp_path / "model", input=(3, 40, 40), width=0.02, density=0.5)
    y = torch.arange(400) % 200
    model.learn("many", (torch.randn(400, 3, 40, 40), y), epochs=(1, 1), held_out=0)
    probe = model.card("many")["probe"]
    assert probe["rows"] == 1
    assert len(kept(probe)) == 200
    small = create(tmp_path / "small")
    learn(small, "many", 1, classes=40)
    probe = small.card("many")["probe"]
    assert probe["rows"] == 8
    assert len(kept(probe)) == 256
    assert small.verify().verified


class Single(nn.Module):
    """Takes nothing but float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.float()).relu())


class Picky(Single):
    """Takes nothing below zero."""

    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("below zero")
        return super().forward(x)


def test_a_module_that_computes_in_single_precision_only_is_probed_in_it(tmp_path: Path):
    model = Model.create(tmp_path / "model", Single(), input=(12,), density=0.5)
    learn(model, "a", 1)
    assert model.card("a")["probe"]["precision"] == "float32"
    assert model.verify().verified


def test_a_module_that_cannot_take_the_probe_has_none(tmp_path: Path):
    module = Picky()
    model = Model.create(tmp_path / "model", module, input=(12,), density=0.5)
    model.learn("a", (examples(1)[0].abs(), examples(1)[1]), **QUICK)
    assert model.card("a")["probe"] is None
    assert Model.open(tmp_path / "model", module).verify().verified


# --- Rounding, and answers that were changed ----------------------------------------------------------------------


def changed(factor: float, digest: str = "0" * 64) -> Callable[[dict[str, Any]], object]:
    """Another machine's answers: the last task's, alternately larger and smaller by a factor."""

    def edit(card: dict[str, Any]) -> None:
        answers = kept(card["probe"]).copy()
        answers *= 1 + factor * np.where(np.arange(len(answers)) % 2, 1, -1)
        card["probe"] |= {"answers": base64.b64encode(answers.astype("<f4").tobytes()).decode(), "digest": digest}

    return edit


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("factor", "fine"), [(0, True), (1e-6, True), (1e-2, False), (-2.0, False)])
def test_rounding_is_accepted_and_a_changed_answer_is_not(tmp_path: Path, own: bool, factor: float, fine: bool):
    module = Single() if own else None
    path = tmp_path / "model"
    model = Model.create(path, module, input=(12,), density=0.5) if own else create(path)
    for number, name in enumerate("ab"):
        learn(model, name, number)
    rewrite_card(path, "b", changed(factor))
    found = verify(Folder(path), module).problems
    assert [problem.tasks for problem in found] == ([] if fine else [("b",)])
    rewrite_card(path, "a", changed(factor))
    if fine:
        assert len(Model.open(path, module).predict(examples(0)[0], "a")) == 48
        return
    with pytest.raises(StoreError, match="does not compute what task 'a' was learned with") as error:
        Model.open(path, module).predict(examples(0)[0], "a")
    assert ("pass the module" if own else "use the version of exssnet") in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", 9), ("rows", True), ("shape", []), ("shape", [2**20, 2**20]), ("shape", "12"), ("below", 0),
        ("below", 10**6), ("precision", "float16"), ("digest", "x"), ("answers", "?"), ("answers", ""),
        ("answers", "AAA="), ("answers", "A" * 4 * 600), ("answers", None),
    ],
)  # fmt: skip
def test_a_probe_of_another_kind_is_a_card_that_cannot_be_read(tmp_path: Path, name: str, value: object):
    path, model = tmp_path / "model", create(tmp_path / "model")
    for number, task in enumerate("ab"):
        learn(model, task, number)
    rewrite_card(path, "b", lambda card: card["probe"].update({name: value}))
    (problem,) = verify(Folder(path)).problems
    assert problem.tasks == ("b",)
    assert "is not the card of a task: probe" in str(problem)
    assert "\n" not in str(problem)
    opened = Model.open(path)
    assert len(opened.predict(examples(0)[0], "a")) == 48
    with pytest.raises(StoreError, match="task 'b' cannot be read"):
        opened.predict(examples(0)[0], "b")


def test_answers_that_are_no_numbers_must_be_none_again(tmp_path: Path):
    path, model = tmp_path / "model", create(tmp_path / "model")
    learn(model, "a", 1)

    def edit(card: dict[str, Any]) -> None:
        answers = kept(card["probe"]).copy()
        answers[0] = np.nan
        card["probe"] |= {"answers": base64.b64encode(answers.tobytes()).decode(), "digest": "0" * 64}

    rewrite_card(path, "a", edit)
    (problem,) = verify(Folder(path)).problems
    assert "its answers have another shape" in str(problem)


# --- Changes of a directory ---------------------------------------------------------------------------------------


def probes(model: StoredModel) -> dict[str, Any]:
    return {task.name: task.card["probe"] for task in model.tasks}


def test_probes_stay_through_changes_and_travel_with_their_tasks(tmp_path: Path):
    here, there = create(tmp_path / "here", density=0.5), create(tmp_path / "there", density=0.5)
    for number, name in enumerate("abc"):
        learn(here, name, number)
        learn(there, f"other {name}", 10 + number, classes=3)
    wanted, others = probes(here), probes(there)
    assert None not in wanted.values()
    here.rename("b", "z")
    here.remove("a")
    assert probes(here) == {"z": wanted["b"], "c": wanted["c"]}
    there.export("other c", tmp_path / "file")
    here.import_task(there, "other b")
    here.import_task(tmp_path / "file")
    assert probes(here) == {"z": wanted["b"], "c": wanted["c"]} | {f"other {n}": others[f"other {n}"] for n in "bc"}
    here.remove("z")
    here.rollback()
    assert Model.open(tmp_path / "here").verify().verified
    there.export("other a", tmp_path / "alone", "model")
    assert probes(Model.open(tmp_path / "alone")) == {"other a": others["other a"]}


def test_a_task_that_does_not_compute_here_what_it_did_is_not_imported(tmp_path: Path):
    here, there = create(tmp_path / "here"), create(tmp_path / "there")
    learn(there, "a", 1)
    there.export("a", tmp_path / "file")
    told = json.loads((tmp_path / "file.json").read_text())
    changed(0.5)(told["card"])
    (tmp_path / "file.json").write_text(json.dumps(told))
    with pytest.raises(StoreError, match="does not compute what task 'a' was learned with"):
        here.import_task(tmp_path / "file")
    assert Model.open(tmp_path / "here").tasks == ()


def test_where_the_first_tasks_have_no_probe_a_later_one_tells(learned: Path, tmp_path: Path):
    """Directories of earlier versions to which tasks were added."""
    path = Path(shutil.copytree(learned, tmp_path / "model"))
    rewrite_card(path, "a", lambda card: card.pop("probe"))
    opened = Model.open(path, Net(nn.Sigmoid()))
    with pytest.raises(StoreError, match="does not compute what task 'b' was learned with"):
        opened.predict(IMAGES, "a")
    with pytest.raises(StoreError, match="does not compute what task 'b' was learned with"):
        opened.learn("c", (IMAGES, LABELS), **QUICK)
    assert len(Model.open(path, Net()).predict(IMAGES, "a")) == len(IMAGES)


def test_opening_reads_the_first_task_alone(learned: Path, monkeypatch: pytest.MonkeyPatch):
    """So it takes as long with a thousand tasks."""
    read, really = [], Folder.read
    monkeypatch.setattr(Folder, "read", lambda folder, file: read.append(file) or really(folder, file))
    opened = Model.open(learned, Net())
    first, second = opened.manifest.tasks
    assert {first.card, first.tensors} <= set(read)
    assert not {second.card, second.tensors} & set(read)


def test_a_damaged_first_task_is_told_when_it_is_used(learned: Path, tmp_path: Path):
    path = Path(shutil.copytree(learned, tmp_path / "model"))
    (path / "files" / Folder(path).manifest().tasks[0].tensors.name).unlink()
    opened = Model.open(path, Net())
    with pytest.raises(StoreError, match="task 'a' cannot be read"):
        opened.predict(IMAGES, "a")


def test_a_module_built_otherwise_is_refused_when_opened(learned: Path):
    with pytest.raises(StoreError, match="differs from the one the model was created with"):
        Model.open(learned, nn.Sequential(nn.Conv2d(1, 6, 3), nn.Flatten(), nn.Linear(294, 2)))
    with pytest.raises(InputError, match="pass the module"):
        Model.open(learned).predict(IMAGES, "a")


def test_the_generator_is_minstd():
    """Its 10,000th number is given by the C++ standard, which calls it minstd_rand."""
    last = 1
    found = minstd(10_000).tolist()
    for number in itertools.islice(found, 300):
        last = last * 48271 % (2**31 - 1)
        assert number == last
    assert found[-1] == 399268537
