"""What one does when the disk is full needs no room on it: to undo the last change, or to remove the last task."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store.second_process import Server, change, examples, state, whole

from exssnet import Model
from exssnet.errors import StoreError
from exssnet.store.directory import Folder
from exssnet.store.stored_model import StoredModel
from exssnet.store.verify import verify

BEFORE = {  # what the directory has been through, and its last task
    "learned": (("create", "learn a 1", "learn b 2"), "b"),
    "removed": (("create", "learn a 1", "learn b 2", "learn c 3", "remove b"), "c"),
    "renamed": (("create", "learn a 1", "rename a b"), "b"),
    "undone": (("create", "learn a 1", "learn b 2", "rollback"), "a"),
    "just created": (("create", "learn a 1"), "a"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories, never changed."""
    where = tmp_path_factory.mktemp("made")
    for name, (changes, _) in BEFORE.items():
        for what in changes:
            change(where / name, what)
    begun = StoredModel.begin(where / "begun", "lenet-300-100", (8,), width=0.05)  # without a manifest before its first
    begun.learn("a", examples(1), epochs=(1, 1))
    return {name: where / name for name in (*BEFORE, "begun")}


def copied(made: dict[str, Path], name: str, where: Path) -> Path:
    return Path(shutil.copytree(made[name], where / "model"))


def fill(disk: Path, left: int = 0) -> None:
    """Leave so many bytes of a disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(ballast, max(0, ballast.stat().st_size - left))


def assert_undone(path: Path, wanted: object, told: dict) -> None:
    assert told["error"] is None, told
    assert whole(path) == wanted


@pytest.mark.parametrize("name", ["learned", "removed", "renamed", "just created"])
def test_a_change_is_undone_on_a_full_disk(server, made, tmp_path, name):
    path = copied(made, name, tmp_path)
    change(path, "rollback")
    wanted = whole(path)
    shutil.rmtree(path)
    path = copied(made, name, tmp_path)
    assert_undone(path, wanted, server.ask(path, "rollback", how="no room"))
    with pytest.raises(StoreError, match=r"no change to undo|no change to undo"):
        change(path, "rollback")
    change(path, "learn f 6")
    assert "f" in [task for task, _, _ in whole(path)]


@pytest.mark.parametrize("name", [*BEFORE, "begun"])
def test_the_last_task_is_removed_on_a_full_disk(server, made, tmp_path, name):
    path, last = copied(made, name, tmp_path), BEFORE.get(name, ((), "a"))[1]
    wanted = state(path)[:-1]
    files = {file.name for file in Folder(path).manifest().tasks[-1:] for file in (file.card, file.tensors)}
    assert_undone(path, wanted, server.ask(path, f"remove {last}", how="no room"))
    assert not files & {each.name for each in (path / "files").iterdir()}
    with pytest.raises(StoreError, match="no change to undo"):
        change(path, "rollback")
    change(path, "learn f 6")
    assert "f" in [task for task, _, _ in whole(path)]


def test_an_earlier_task_is_not_removed_on_a_full_disk_and_none_is_lost(server, made, tmp_path):
    path, wanted = copied(made, "learned", tmp_path), state(made["learned"])
    told = server.ask(path, "remove a", how="no room")
    assert told["error"] == "StoreError", told
    assert told["message"] == (
        f"{path} cannot be written and is unchanged, but its last change cannot be undone any more: "
        f"No space left on device; free disk space and try again, or remove the last task"
    )
    assert whole(path) == wanted
    change(path, "remove a")
    assert whole(path) == tuple(task for task in wanted if task[0] != "a")


@pytest.mark.parametrize("what", ["learn f 6", "rename a z"])
def test_another_change_on_a_full_disk_is_refused_and_leaves_the_way_back(server, made, tmp_path, what):
    path, wanted = copied(made, "learned", tmp_path), state(made["learned"])
    told = server.ask(path, what, how="no room")
    assert told["error"] == "StoreError"
    assert told["message"].endswith(
        "cannot be written and is unchanged: No space left on device; free disk space and try again"
    )
    assert whole(path) == wanted
    change(path, "rollback")
    assert whole(path) == wanted[:-1]


def test_tasks_are_removed_from_the_last_one_on_until_there_is_room(made, small_disk):
    """On a file system that is really full, to the last block."""
    for name in ("learned", "removed"):
        path, left = copied(made, name, small_disk), state(made[name])
        fill(small_disk)
        for task, _, _ in left[::-1]:
            left = left[:-1]
            removed = Model.open(path)
            assert not removed.remove(task).undoable
            assert whole(path) == left
            fill(small_disk)
        (small_disk / "ballast").unlink()
        shutil.rmtree(path)


def test_a_change_is_undone_on_a_file_system_that_is_full_to_the_last_block(made, small_disk):
    for name in ("learned", "removed", "renamed"):
        path = copied(made, name, small_disk)
        fill(small_disk)
        Model.open(path).rollback()
        report = verify(Folder(path))
        assert report.verified, report.problems
        (small_disk / "ballast").unlink()
        other = Path(shutil.copytree(made[name], small_disk / "other"))
        change(other, "rollback")
        assert whole(path) == whole(other)
        shutil.rmtree(other)
        shutil.rmtree(path)


def test_an_earlier_task_is_removed_where_there_is_a_little_room_or_stays(made, small_disk):
    path, wanted = copied(made, "learned", small_disk), state(made["learned"])
    fill(small_disk)
    with pytest.raises(StoreError, match="free disk space and try again"):
        Model.open(path).remove("a")
    assert whole(path) == wanted
    fill(small_disk, 16384)
    Model.open(path).remove("a")
    assert whole(path) == wanted[1:]
