"""No damage to a model directory goes unnoticed, and it costs no more tasks than it must."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.store.second_process import change, examples, state, whole
from tests.store.tamper import KINDS, all_files, hit, own_network
from torch import nn

import exssnet
from exssnet.errors import StoreError
from exssnet.store.directory import Folder
from exssnet.store.verify import ROLLBACK, verify

FLIPS = 500


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
            with pytest.raises(StoreError, match=f"{file.name} is .*: restore the file"):
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
    assert done.stderr.startswith("exssnet: tasks that cannot be read: c; ")
    assert f"{file.name} is damaged" in done.stderr
    assert done.stderr.count("\n") == 1
    again = subprocess.run(
        [sys.executable, "-m", "exssnet", "remove", removed, "--task", "c"], capture_output=True, text=True
    )
    assert again.stdout == "removed c, which could not be read\n"


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
    with pytest.raises(StoreError, match=r"no manifest.json: restore it"):
        change(removed, "create")
    (removed / "manifest.json").write_bytes(content)
    assert whole(removed) == then


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
    with pytest.raises(StoreError, match="restore the file"):
        exssnet.Model.open(removed).rename("a", "z")
