"""Whole files of a model directory that hold values of other kinds: signed again, so that no digest tells."""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tests.store.second_process import examples
from tests.store.tamper import Edit, own_network, rewrite, rewrite_card
from torch import Tensor

import exssnet
from exssnet.cli.model_display import print_tasks
from exssnet.errors import ExssnetError, StoreError
from exssnet.store.directory import Folder
from exssnet.store.verify import verify

WRONG: list[Any] = [None, True, -1, 10**18, 1e300, "x", "x" * 10_000, [], {}, [[]], {"a": None}, [10**6] * 3]


def acts(path: Path) -> Iterator[Callable[[], object]]:
    """What users do with a directory."""
    yield lambda: print_tasks(exssnet.Model.open(path), as_json=True)
    yield lambda: exssnet.Model.open(path).summary()
    yield lambda: exssnet.Model.open(path).predict(examples(0)[0], "a")
    yield lambda: exssnet.Model.open(path).predict(examples(0)[0], "auto")
    yield lambda: exssnet.Model.open(path).plan(2)
    yield lambda: [str(problem) for problem in verify(Folder(path)).problems]


def assert_told_in_a_line(path: Path) -> int:
    """Nothing but errors of our own, short ones; how many."""
    errors = 0
    for act in acts(path):
        said = told(act)
        assert "\n" not in said
        assert len(said) < 1500
        errors += said != ""
    return errors


def told(act: Callable[[], object]) -> str:
    try:
        act()
    except ExssnetError as error:
        return str(error)
    return ""


def values_in(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value, of long lists of the first two."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*path, name)
        yield from values_in(one, (*path, name))


def put(found: Any, path: tuple[str | int, ...], value: object) -> None:
    for step in path[:-1]:
        found = found[step]
    found[path[-1]] = value


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks from a table, so that a card has everything that one can have."""
    where = tmp_path_factory.mktemp("table")
    inputs, labels = examples(1)
    pairs = zip(inputs.tolist(), labels.tolist(), strict=True)
    rows = [",".join(f"{number:.3f}" for number in row) + f",{label}" for row, label in pairs]
    (where / "data.csv").write_text("\n".join([",".join([*"abcdefgh", "label"]), *rows]) + "\n")
    model = exssnet.Model.create(where / "model", "mlp", input=(8,), width=0.05)
    for name in "ab":
        model.learn(name, where / "data.csv", label="label", epochs=(1, 1))
    return where / "model"


@pytest.mark.parametrize("part", ["manifest", "base", "card"])
def test_a_value_of_another_kind_anywhere_is_told_in_a_line(table, tmp_path, part, capsys):
    path = Path(shutil.copytree(table, tmp_path / "model"))
    whole = json.loads((path / "manifest.json").read_text())
    content = (path / "manifest.json").read_bytes()
    card = json.loads((path / "files" / whole["tasks"][0]["card"]["name"]).read_text())
    found = {"manifest": whole, "base": whole["base"], "card": card}[part]
    places = [place for place in values_in(found) if part != "manifest" or place[0] not in ("base", "sha256")]
    chance, errors = random.Random(0), 0
    for place in places:
        for value in chance.sample(WRONG, 2):
            if part == "card":
                rewrite_card(path, "a", lambda card, at=place, new=value: put(card, at, new), sign=False)
            else:
                at = ("base", *place) if part == "base" else place
                rewrite(path, lambda manifest, at=at, new=value: put(manifest, at, new))
            errors += assert_told_in_a_line(path) > 0
            (path / "manifest.json").write_bytes(content)
    assert errors > len(places) // 2  # of two for each; some values are as good as those that were there


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda base: base.update(input="8"), r"the manifest's base: input is '8': a list"),
        (lambda base: base.update(input=[8.0]), r"base: input\[0\] is 8\.0: a whole number"),
        (lambda base: base.update(input=[2**31] * 16), r"base is refused: input is .*: more than [0-9,]+ numbers"),
        (lambda base: base.update(input=[2**27]), r"would have [0-9,]+ weights, more than"),
        (lambda base: base.update(width="1"), r"width is '1'"),
        (lambda base: base.update(width=300), r"would have [0-9,]+ weights, more than"),
        (lambda base: base.update(density=[0.1]), r"density is \[0\.1\]"),
        (lambda base: base.update(seed="0"), r"seed is '0'"),
        (lambda base: base.update(private="bias"), r"private is 'bias'"),
        (lambda base: base.update(structure=[1]), r"structure\[0\] is 1"),
        (lambda base: base.update(structure=["x" * 10**5]), r"structure\[0\] is 'x+\.\.\.x+'"),
        (lambda base: base.pop("method"), "method is missing"),
    ],
)
def test_a_base_of_another_kind_is_refused_by_the_name_of_its_field(removed, edit, why):
    rewrite(removed, lambda found: edit(found["base"]))
    with pytest.raises(ExssnetError, match=why) as error:
        exssnet.Model.open(removed).predict(examples(0)[0], "a")
    assert "\n" not in str(error.value)
    (problem,) = verify(Folder(removed)).problems
    assert (problem.file, problem.tasks) == ("manifest.json", ("all tasks",))


CARDS: list[tuple[Edit, str]] = [
    (lambda card: card.update(scaling=3), "scaling is 3"),
    (lambda card: card.update(scaling={"mean": 0, "std": 1}), "scaling.mean is 0: a list was expected"),
    (lambda card: card.update(scaling={"mean": [[0]], "std": [1]}), r"scaling.mean\[0\] is \[0\]: a number"),
    (lambda card: card.update(scaling={"mean": [0], "std": [0]}), r"scaling.std\[0\] is 0"),
    (lambda card: card.update(scaling={"mean": [0] * 3, "std": [1] * 3}), "a scaling with 3 means and 3 deviations"),
    (lambda card: card.update(scaling={"mean": [0], "std": [1] * 8}), "a scaling with 1 means and 8 deviations"),
    (lambda card: card.update(scaling={"scale": 2.0}), "its scaling has no mean"),
    (lambda card: card.update(recipe=[]), r"recipe is \[\]"),
    (lambda card: card["recipe"].update(shape=8), "recipe.shape is 8"),
    (lambda card: card["recipe"].update(shape=[2**20] * 4), "an input has more than"),
    (lambda card: card["recipe"].update(columns=["a"]), r"a table of shape \[8\] has 1 columns"),
    (lambda card: card["recipe"].update(kind="array"), "dtype is missing"),
    (lambda card: card.update(labels="ab"), "labels is 'ab'"),
    (lambda card: card.update(labels=["a"]), "1 labels for 2 classes"),
    (lambda card: card["task"].update(name="a"), "is the card of another task"),
    (lambda card: card["task"].update(classes=True), "task.classes is True"),
    (lambda card: card["task"].update(digests=[]), r"task.digests is \[\]"),
    (lambda card: card["task"].pop("kept"), "task.kept is missing"),
    (lambda card: card.update(accuracy="high"), "accuracy is 'high'"),
    (lambda card: card.update(later=nested(100)), "is nested deeper than"),
]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(("edit", "why"), CARDS)
def test_a_card_of_another_kind_is_that_tasks_problem_and_those_before_answer(table, tmp_path, edit, why):
    path = Path(shutil.copytree(table, tmp_path / "model"))
    rewrite_card(path, "b", edit, sign=False)
    (problem,) = verify(Folder(path)).problems
    assert problem.tasks == ("b",)
    assert re.search(why, str(problem)), problem
    assert "\n" not in str(problem)
    model = exssnet.Model.open(path)
    assert len(model.predict(examples(0)[0], "a")) > 0
    for ask in (model.predict, model.probabilities, model.evaluate):
        with pytest.raises(StoreError, match="task 'b' cannot be read"):
            ask(examples(0) if ask == model.evaluate else examples(0)[0], "b")


def of_task(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Other tensors of the second task, signed."""
    entry = Folder(path).manifest().tasks[1]
    tensors = load((path / "files" / entry.tensors.name).read_bytes())
    edit(tensors)
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"{digest[:32]}.safetensors"
    (path / "files" / name).write_bytes(content)
    rewrite(path, lambda found: found["tasks"][1]["tensors"].update(name=name, sha256=digest, size=len(content)))


HEAD = "private.head.weight"
TENSORS: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda found: found.update({HEAD: found[HEAD][:1]}), "its tensor 'head.weight' does not match the network"),
    (lambda found: found.update({HEAD: found[HEAD][:, :-1]}), "its tensor 'head.weight' does not match"),
    (lambda found: found.update({HEAD: found[HEAD].double()}), "its tensor 'head.weight' does not match"),
    (lambda found: found.pop(HEAD), "its tensor 'head.weight' does not match"),
    (lambda found: found.update({"private.more": torch.zeros(2)}), "its tensor 'more' does not match"),
    (lambda found: found.update(values=torch.tensor([1.0])), "for [0-9]+ weights in torch.float32"),
    (lambda found: found.update(values=torch.tensor(1.0)), "for [0-9]+ weights in torch.float32"),
    (lambda found: found.update(mask=found["mask"].float()), "a coded mask is torch.float32"),
    (lambda found: found.update(mask=found["mask"].bfloat16()), "a coded mask is torch.bfloat16"),
    (lambda found: found.pop("mask"), "it is not a task: 'mask'"),
]


@pytest.mark.parametrize(("edit", "why"), TENSORS)
def test_tensors_that_the_network_cannot_run_with_are_that_tasks_problem(table, tmp_path, edit, why):
    path = Path(shutil.copytree(table, tmp_path / "model"))
    of_task(path, edit)
    (problem,) = verify(Folder(path)).problems
    assert problem.tasks == ("b",)
    assert re.search(why, str(problem)), problem
    model = exssnet.Model.open(path)
    assert len(model.predict(examples(0)[0], "a")) > 0
    with pytest.raises(StoreError, match="task 'b' cannot be read"):
        model.predict(examples(0)[0], "b")


@pytest.mark.parametrize("name", ["weights", "private.2.bias", "frozen.none", "else", "private."])
def test_a_base_file_with_other_tensors_is_refused(directories, tmp_path, name):
    path = Path(shutil.copytree(directories["own network"], tmp_path / "model"))
    file = Folder(path).manifest().base_file
    assert file is not None
    tensors = load((path / "files" / file.name).read_bytes()) | {name: torch.zeros(3, 3)}
    content = save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    (path / "files" / f"{digest[:32]}.safetensors").write_bytes(content)
    base = {"name": f"{digest[:32]}.safetensors", "sha256": digest, "size": len(content)}
    rewrite(path, lambda found: found.update(base_file=base))
    with pytest.raises(StoreError, match=f"tensor '{name}' of the base file does not match the network"):
        exssnet.Model.open(path, own_network()).predict(examples(0)[0], "a")
    (problem,) = verify(Folder(path), own_network()).problems
    assert problem.tasks == ("all tasks",)
