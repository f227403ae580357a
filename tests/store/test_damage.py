"""No damage to a model directory goes unnoticed, and nothing written in one is trusted."""

import ast
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tests.store.second_process import change, examples, state, whole
from torch import nn

import exssnet
from exssnet.errors import ExssnetError, StoreError
from exssnet.store.folder import Folder
from exssnet.store.verify import ROLLBACK, verify

FLIPS = 500
KINDS = ("removed", "undone", "own network")
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three with several tasks and an earlier state: with files of its own, undone already, with a base file."""
    where = tmp_path_factory.mktemp("directories")
    for kind in ("removed", "undone"):
        for what in ("create", "learn a 1", "learn b 2", "learn c 3", "remove b" if kind == "removed" else "rollback"):
            change(where / kind, what)
    model = exssnet.Model.create(where / "own network", own_network(), input=(8,))
    for seed, name in enumerate("ab"):
        model.learn(name, examples(seed), epochs=(1, 1))
    return {kind: where / kind for kind in KINDS}


def own_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, directories: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(directories[request.param], tmp_path / "model"))


@pytest.fixture
def removed(directories: dict[str, Path], tmp_path: Path) -> Path:
    """Tasks a and c; b was removed."""
    return Path(shutil.copytree(directories["removed"], tmp_path / "model"))


def all_files(path: Path) -> list[Path]:
    return [path / "manifest.json", *sorted((path / "files").iterdir())]


def hit(path: Path) -> dict[str, tuple[str, ...]]:
    """The tasks that need each file, from the JSON alone."""
    now = json.loads((path / "manifest.json").read_text())
    names = tuple(task["name"] for task in now["tasks"])
    found = {each.name: (ROLLBACK,) for each in (path / "files").iterdir()} | {"manifest.json": ("all tasks",)}
    if now["base_file"]:
        found[now["base_file"]["name"]] = names
    for place, task in enumerate(now["tasks"]):
        found |= {task[kind]["name"]: names[place:] for kind in ("card", "tensors")}
    return found


def assert_found(path: Path, wanted: dict[str, tuple[str, ...]], *damaged: Path) -> None:
    """Exactly these files are told, with the tasks that need them, each in a line."""
    problems = verify(Folder(path)).problems
    assert {problem.file: problem.tasks for problem in problems} == {each.name: wanted[each.name] for each in damaged}
    for problem in problems:
        assert problem.file in str(problem)
        assert all(task in str(problem) for task in problem.tasks)
        assert "\n" not in str(problem)


def before_name(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["before"]["name"])


def module_of(path: Path) -> nn.Module | None:
    return own_network() if exssnet.Model.open(path).base.network is None else None


# --- damage --------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found_with_its_file_and_tasks(path):
    chance, wanted, files = random.Random(0), hit(path), all_files(path)
    assert verify(Folder(path), module_of(path)).verified
    sizes = [each.stat().st_size for each in files]
    places = [(each, chance.randrange(size)) for each, size in zip(files, sizes, strict=True) for _ in range(5)]
    chosen = chance.choices(files, sizes, k=-(-FLIPS // len(KINDS)) - len(places))
    for file, place in places + [(each, chance.randrange(each.stat().st_size)) for each in chosen]:
        content = file.read_bytes()
        flipped = content[place] ^ chance.randrange(1, 256)
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        assert_found(path, wanted, file)
        file.write_bytes(content)
    assert verify(Folder(path), module_of(path)).verified


def test_a_cut_grown_emptied_or_missing_file_is_found(path):
    wanted = hit(path)
    note = Folder(path).note((path / "manifest.json").read_bytes())
    for file in all_files(path):
        content = file.read_bytes()
        for damaged in (content[:-1], content[: len(content) // 2], b"", content + b"\n", content + content):
            file.write_bytes(damaged)
            assert_found(path, wanted, file)
        file.unlink()
        if note is not None and file.name == note.name:  # it said why the manifest before is gone
            assert_found(path, {before_name(path): (ROLLBACK,)}, Path(before_name(path)))
        else:
            assert_found(path, wanted, file)
            file.mkdir()
            assert_found(path, wanted, file)
            file.rmdir()
        file.write_bytes(content)
    assert verify(Folder(path), module_of(path)).verified


def test_two_files_in_each_others_place_are_found(path):
    wanted, files = hit(path), all_files(path)[1:]
    for one, other in ((one, other) for one in files for other in files if one < other):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second), other.write_bytes(first)
        lost = before_name(path) in (one.name, other.name)  # and with it the names of the files that only it needs
        told = [file for file in (one, other) if not (lost and wanted[file.name] == (ROLLBACK,))]
        assert_found(path, wanted, *told, *[path / "files" / before_name(path)] * lost)
        one.write_bytes(first), other.write_bytes(second)


def test_the_command_tells_the_damaged_file_and_its_tasks_and_fails(removed):
    file = removed / "files" / Folder(removed).manifest().tasks[0].tensors.name
    content = file.read_bytes()
    for damaged, code in ((content, 0), (content[:-1] + b"?", 1)):
        file.write_bytes(damaged)
        command = [sys.executable, "-m", "exssnet", "verify", str(removed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("it hits a, c" in done.stdout and file.name in done.stdout) == bool(code)
        assert done.stderr == ""


def damaged(path: Path, place: int, kind: str) -> Path:
    """With one changed byte in a file of a task, or without the file."""
    entry = Folder(path).manifest().tasks[place]
    file = path / "files" / (entry.card if kind == "card" else entry.tensors).name
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if kind == "lost":
        file.unlink()
    return file


@pytest.mark.parametrize("kind", ["card", "tensors", "lost"])
def test_a_damaged_task_and_those_after_it_say_so_and_those_before_answer_as_ever(path, kind):
    module, inputs = module_of(path), examples(0)[0]
    model = exssnet.Model.open(path, module)
    names = [task.name for task in model.tasks]
    wanted = {name: model.probabilities(inputs, name) for name in names}
    for place in reversed(range(len(names))):  # so that each is the first that is damaged
        file = damaged(path, place, kind)
        before = {each: each.read_bytes() for each in all_files(path)}
        for name in names[:place]:
            assert torch.equal(exssnet.Model.open(path, module).probabilities(inputs, name), wanted[name])
        for name in names[place:]:
            opened = exssnet.Model.open(path, module)
            for ask in (
                opened.probabilities,
                opened.predict,
                lambda x, task, m=opened: m.predict(x, tasks=[task] * len(x)),
            ):
                with pytest.raises(StoreError, match=f"task '{name}' cannot be read: .*{file.name} is"):
                    ask(inputs, name)
            with pytest.raises(StoreError, match=f"task '{name}' cannot be read"):
                opened.export(name, path.parent / "out")
        for refused in (
            lambda m: m.learn("new", examples(9), epochs=(1, 1)), lambda m: m.plan(), lambda m: m.route(inputs),
        ):  # fmt: skip
            with pytest.raises(StoreError, match=f"{file.name} is .*: put the file back"):
                refused(exssnet.Model.open(path, module))
        assert {each: each.read_bytes() for each in all_files(path)} == before


@pytest.mark.parametrize("kind", ["card", "tensors", "lost"])
def test_damaged_tasks_can_be_taken_out_from_the_last_one_on(tmp_path, kind):
    path = tmp_path / "model"
    for what in ("create", "learn a 1", "learn b 2", "learn c 3"):
        change(path, what)
    wanted = state(path)
    damaged(path, 1, kind)
    with pytest.raises(StoreError, match="remove the tasks from the last one down to 'b'"):
        exssnet.Model.open(path).remove("a")
    with pytest.raises(StoreError, match="down to 'b'"):
        exssnet.Model.open(path).remove("b")
    model = exssnet.Model.open(path)
    assert model.remove("c") is None
    assert model.remove("b") is None
    assert state(path) == wanted[:1]
    assert {problem.tasks for problem in verify(Folder(path)).problems} == {(ROLLBACK,)}
    model.learn("b", examples(2), epochs=(1, 1))
    assert verify(Folder(path)).verified


def test_the_command_line_lists_the_tasks_before_a_damaged_card(removed):
    file = damaged(removed, 1, "card")
    done = subprocess.run([sys.executable, "-m", "exssnet", "tasks", removed], capture_output=True, text=True)
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["task", "a", "1"]
    assert done.stderr.startswith("exssnet: not readable: c; ")
    assert f"{file.name} is damaged" in done.stderr
    assert done.stderr.count("\n") == 1
    again = subprocess.run(
        [sys.executable, "-m", "exssnet", "remove", removed, "--task", "c"], capture_output=True, text=True
    )
    assert again.stdout == "removed c, which could not be read any more\n"


def test_a_file_that_is_written_again_heals(removed):
    card = removed / "files" / Folder(removed).manifest().tasks[0].card.name
    change(removed, "rename a z")
    card.write_bytes(card.read_bytes()[::-1])  # the way back needs it
    assert [problem.file for problem in verify(Folder(removed)).problems] == [card.name]
    change(removed, "rename z a")
    assert [name for name, _, _ in whole(removed)] == ["a", "c"]


def test_a_lost_manifest_does_not_cost_the_tasks(removed):
    content, then = (removed / "manifest.json").read_bytes(), state(removed)
    (removed / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"has lost its manifest.json: put that back"):
        change(removed, "create")
    (removed / "manifest.json").write_bytes(content)
    assert whole(removed) == then


# --- nothing is trusted --------------------------------------------------------------------------------------------


def rewrite(path: Path, edit: Edit) -> None:
    """Another manifest, with the right digest of itself: what somebody with bad intentions could write."""
    found = json.loads((path / "manifest.json").read_text())
    del found["sha256"]
    edit(found)
    digest = hashlib.sha256((json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()).hexdigest()
    text = json.dumps(found | {"sha256": digest}, indent=1, ensure_ascii=False) + "\n"
    (path / "manifest.json").write_text(text, encoding="utf-8")


def assert_refused(path: Path, why: str) -> None:
    before = {each: each.read_bytes() for each in all_files(path)}
    refusals = {"learn new 9": why, "remove a": why, "rollback": why, "create": "is a model directory already"}
    for what, refusal in refusals.items():
        with pytest.raises(StoreError, match=refusal) as error:
            change(path, what)
        assert "\n" not in str(error.value)
    assert [problem.file for problem in verify(Folder(path)).problems] == ["manifest.json"]
    assert {each: each.read_bytes() for each in all_files(path)} == before


def test_a_newer_format_is_refused_and_left_alone(removed):
    rewrite(removed, lambda found: found.update(format=2, exssnet="9.9"))
    assert_refused(removed, r"manifest.json has format 2, from exssnet 9.9; this version reads 1: upgrade")


SHA = "0123456789abcdef" * 4
OUTSIDE = [
    {"name": "../../secret.json", "sha256": SHA, "size": 1},
    {"name": "/etc/passwd", "sha256": SHA, "size": 1},
    {"name": f"../{SHA[:32]}.json", "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.json/../../x.json", "sha256": SHA, "size": 1},
    {"name": f"{SHA[1:33]}.json", "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.pickle", "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.json\0", "sha256": SHA, "size": 1},
    {"name": "../" * 10 + "xx.json", "sha256": "../" * 10 + "xx" + SHA[:32], "size": 1},
    {"name": f"{SHA[:32]}.json", "sha256": SHA[:32], "size": 1},
    {"name": f"{SHA[:32]}.json", "sha256": SHA, "size": float("inf")},
    {"name": ["x"], "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.json", "sha256": SHA},
    "manifest.json",
    0,
]


@pytest.mark.parametrize("file", OUTSIDE, ids=range(len(OUTSIDE)))
def test_a_file_name_that_leads_elsewhere_is_refused(removed, file):
    content = (removed / "manifest.json").read_bytes()
    edits: list[Edit] = [
        lambda found: found["tasks"][0].update(card=file),
        lambda found: found["tasks"][1].update(tensors=file),
        lambda found: found.update(before=file),
        lambda found: found.update(base_file=file),
    ]
    for edit in edits:
        rewrite(removed, edit)
        assert_refused(removed, "is not a manifest of format 1")
        (removed / "manifest.json").write_bytes(content)


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: found.update(base=[]),
        lambda found: found.update(tasks=3),
        lambda found: found.update(tasks=[found["tasks"][0]] * 2),
        lambda found: found["tasks"][0].update(name=None),
        lambda found: found["tasks"][0].update(predictor=1),
        lambda found: found.update(number="1"),
        lambda found: found.update(change={}),
        lambda found: found.pop("before"),
        lambda found: found.update(format=True),
        lambda found: found.update(format="1"),
        lambda found: found.update(format=0),
    ],
)
def test_a_manifest_with_values_of_another_kind_is_refused(removed, edit):
    rewrite(removed, edit)
    assert_refused(removed, "is not a manifest of format 1")


NONSENSE = [b"", b"\xff", b"{}", b"[]", b"1", b"[" * 100_000, b'{"format": 1, "x": "\\ud800"}']


@pytest.mark.parametrize("content", NONSENSE, ids=range(len(NONSENSE)))
def test_what_is_no_manifest_is_told_in_a_line(removed, content):
    (removed / "manifest.json").write_bytes(content)
    assert_refused(removed, "manifest.json is damaged")


def test_nothing_is_ever_unpickled(path):
    package = Path(exssnet.__file__).parent
    for source in package.rglob("*.py"):
        tree = ast.parse(source.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules, calls = {name.split(".")[0] for name in names}, set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                safe = any(word.arg == "allow_pickle" and ast.unparse(word.value) == "False" for word in node.keywords)
                calls |= set() if safe else {ast.unparse(node.func)}
        if source.name != "pixels.py":  # which talks to processes that it has started itself
            assert not modules & {"pickle", "dill", "joblib", "marshal"}, source
        assert not calls & {"torch.load", "eval", "exec", "__import__", "np.load", "numpy.load"}, source
        if source.parent.name == "store":
            assert "importlib" not in modules, source
            assert "compile" not in calls, source
    for file in all_files(path):
        read = {".json": json.loads, ".safetensors": load}[file.suffix]
        read(file.read_bytes())


def test_files_of_others_do_not_matter_and_stay(removed):
    others = [removed / "README", removed / "files" / "notes.txt", removed / "files" / "x.json", removed / ".hidden"]
    then = state(removed)
    for other in others:
        other.write_text("mine")
    (removed / "files" / "folder").mkdir()
    assert whole(removed) == then
    change(removed, "learn b 2")
    change(removed, "rollback")
    assert whole(removed) == then
    assert all(other.read_text() == "mine" for other in others)


@pytest.mark.parametrize("network", ["transformer-9000", "trap:make", "os:getcwd", None])
def test_a_directory_that_names_another_network_opens_and_imports_nothing(removed, monkeypatch, tmp_path, network):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    rewrite(removed, lambda found: found["base"].update(network=network))
    before = set(sys.modules)
    model = exssnet.Model.open(removed)
    assert [task.name for task in model.tasks] == ["a", "c"]
    assert model.summary()["base"]["network"] == network
    with pytest.raises(ExssnetError) as error:
        model.predict(examples(0)[0], "a")
    assert "\n" not in str(error.value)
    assert "pass the module" in str(error.value) if network is None else network in str(error.value)
    assert verify(Folder(removed)).verified == (network is None)  # whose files alone are checked
    assert set(sys.modules) == before


# --- the way back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["learn c 3", "remove a", "rename a z"])
def test_rollback_restores_every_byte_once_and_the_task_is_learned_again_the_same(tmp_path, what):
    path = tmp_path / "model"
    for each in ("create", "learn a 1", "learn b 2"):
        change(path, each)
    manifest, old = (path / "manifest.json").read_bytes(), whole(path)
    change(path, what)
    new = whole(path)
    for _ in range(2):
        change(path, "rollback")
        assert (path / "manifest.json").read_bytes() == manifest
        assert whole(path) == old
        with pytest.raises(StoreError, match="only the last change can be undone, and it has been") as error:
            change(path, "rollback")
        assert "\n" not in str(error.value)
        assert (path / "manifest.json").read_bytes() == manifest
        change(path, what)
        assert whole(path) == new


def test_a_new_directory_has_nothing_to_undo(tmp_path):
    change(tmp_path / "model", "create")
    change(tmp_path / "model", "learn a 1")
    change(tmp_path / "model", "rollback")
    assert whole(tmp_path / "model") == ()
    with pytest.raises(StoreError, match="has no change that could be undone"):
        change(tmp_path / "model", "rollback")


def test_a_damaged_way_back_is_refused_and_the_tasks_stay(removed):
    then, wanted = state(removed), hit(removed)
    for name in [name for name, tasks in wanted.items() if tasks == (ROLLBACK,)]:
        file = removed / "files" / name
        content = file.read_bytes()
        for damage in (lambda file=file: file.write_bytes(b"{}"), file.unlink):
            damage()
            with pytest.raises(StoreError, match=name):
                change(removed, "rollback")
            assert state(removed) == then
            file.write_bytes(content)
    change(removed, "rollback")
    assert [name for name, _, _ in whole(removed)] == ["a", "b", "c"]


@pytest.mark.parametrize("wrong", ["card", "tensors"])
def test_a_whole_file_that_holds_no_task_is_a_problem_of_that_file_and_those_before_answer(removed, wrong):
    """Not damaged on the disk, but written by something else."""
    entry = Folder(removed).manifest().tasks[1]
    old = removed / "files" / (entry.card if wrong == "card" else entry.tensors).name
    content = b"{}\n" if wrong == "card" else save({"mask": torch.zeros(3, dtype=torch.uint8)})
    digest = hashlib.sha256(content).hexdigest()
    name = digest[:32] + old.suffix
    (removed / "files" / name).write_bytes(content)
    rewrite(removed, lambda found: found["tasks"][1][wrong].update(name=name, sha256=digest, size=len(content)))
    (problem,) = verify(Folder(removed)).problems
    assert (problem.file, problem.tasks) == (name, ("c",))
    model = exssnet.Model.open(removed)
    assert len(model.predict(examples(0)[0], "a")) > 0
    with pytest.raises(StoreError, match="task 'c' cannot be read"):
        model.predict(examples(0)[0], "c")
    assert model.remove("c") is None
    assert [task.name for task in model.tasks] == ["a"]


def test_an_open_model_sees_that_a_file_was_put_back_and_that_a_damaged_task_was_removed_elsewhere(removed):
    inputs = examples(0)[0]
    model = exssnet.Model.open(removed)
    file = removed / "files" / Folder(removed).manifest().tasks[1].tensors.name
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    with pytest.raises(StoreError, match="task 'c' cannot be read"):
        model.predict(inputs, "c")
    file.write_bytes(content)
    assert len(model.predict(inputs, "c")) == len(inputs)
    file.write_bytes(content[::-1])
    other = exssnet.Model.open(removed)
    with pytest.raises(StoreError):
        other.plan()
    assert exssnet.Model.open(removed).remove("c") is None
    assert len(exssnet.Model.open(removed).predict(inputs, "a")) == len(inputs)


def test_a_directory_with_damaged_tensors_is_not_renamed(removed):
    damaged(removed, 1, "tensors")
    with pytest.raises(StoreError, match="put the file back"):
        exssnet.Model.open(removed).rename("a", "z")
