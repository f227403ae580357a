"""Whatever happens to a process that changes a model directory, the directory holds the old state or the new one."""

import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store.second_process import Server, State, answers, change, examples, state, whole

import exssnet
from exssnet.errors import ExssnetError, StoreError
from exssnet.store.directory import Folder
from exssnet.store.format.manifest import parse
from exssnet.store.verify import verify

pytestmark = pytest.mark.slow

KILLS = 200
NOBODY = 65534
CHANGES = ("learn c 3", "remove a", "rename b d", "rollback")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as found:
        yield found


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tasks a and b, never changed."""
    path = tmp_path_factory.mktemp("start") / "model"
    for what in ("create", "learn a 1", "learn b 2"):
        change(path, what)
    return path


@pytest.fixture(scope="module")
def after(start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    """What the directory holds after each change that nothing disturbs."""
    found = {"": state(start)}
    for what in CHANGES:
        path = copied(start, tmp_path_factory.mktemp("after"))
        change(path, what)
        found[what] = whole(path)
    assert [name for name, _, _ in found["rollback"]] == ["a"]
    return found


def copied(start: Path, where: Path) -> Path:
    shutil.rmtree(where / "model", ignore_errors=True)
    return Path(shutil.copytree(start, where / "model"))


def manifest(path: Path) -> bytes:
    """Of the state that is committed."""
    return Folder(path).manifest_bytes()


def assert_nothing_left_over(path: Path) -> None:
    """Only what the manifest and the one before it need is on the disk."""
    now = Folder(path).manifest()
    named = {file.name for file in now.files()}
    if now.before is not None:
        named |= {now.before.name, *(file.name for file in parse(Folder(path).read(now.before), "before").files())}
    assert {each.name for each in (path / "files").iterdir()} == named
    assert {each.name for each in path.iterdir()} == {"manifest.json", "files", "lock"}


# --- killed --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_directory_survives_200_kills_at_random_times(server, start, after, tmp_path):
    path, chance, kills = copied(start, tmp_path), random.Random(0), 0
    begin = manifest(path)
    seconds = {}
    for what in ("learn c 3", "rollback", "remove a", "rollback"):
        seconds[what] = server.ask(path, what)["seconds"]
    assert manifest(path) == begin
    while kills < KILLS:
        old = manifest(path)
        what = "rollback" if old != begin else chance.choice(["learn c 3", "remove a"])
        before, then = state(path), after["" if what == "rollback" else what]
        kills += server.ask(path, what, after=chance.uniform(0, 1.1 * seconds[what]))["killed"]
        found = whole(path)
        if manifest(path) == old:
            assert found == before
            change(path, what)
            found = whole(path)
        assert found == then
        assert what != "rollback" or manifest(path) == begin
    change(path, "rename b z")
    assert_nothing_left_over(path)


@pytest.mark.parametrize("what", CHANGES)
def test_a_kill_at_any_writing_operation_leaves_the_old_state_or_the_new_one(server, start, after, tmp_path, what):
    count = server.ask(copied(start, tmp_path), what)["count"]
    seen = set()
    for at in range(1, count + 1):
        path = copied(start, tmp_path)
        assert server.ask(path, what, at=at)["killed"]
        found = whole(path)
        seen.add(found)
        if manifest(path) == manifest(start):
            assert found == after[""]
            change(path, what)
        assert whole(path) == after[what]
        change(path, "learn e 5")
        assert_nothing_left_over(path)
    assert seen == {after[""], after[what]}


def test_a_kill_at_any_writing_operation_of_create_leaves_nothing_or_a_directory(server, tmp_path):
    count = server.ask(tmp_path / "first", "create")["count"]
    for at in range(1, count + 1):
        path = tmp_path / str(at)
        assert server.ask(path, "create", at=at)["killed"]
        if not (path / "manifest.json").exists():
            with pytest.raises(StoreError, match="not a model directory"):
                exssnet.Model.open(path)
            change(path, "create")
        assert whole(path) == ()
        change(path, "learn a 1")
        assert_nothing_left_over(path)


@pytest.mark.parametrize("size", [1, 200, 330, 800, 1000, 1600])
def test_a_process_that_dies_in_the_middle_of_a_file_leaves_the_old_state(server, start, after, tmp_path, size):
    path = copied(start, tmp_path)
    assert server.ask(path, "learn c 3", at=size, how="SIGXFSZ")["killed"]
    assert whole(path) == after[""]
    assert manifest(path) == manifest(start)
    change(path, "learn c 3")
    assert whole(path) == after["learn c 3"]
    assert_nothing_left_over(path)


# --- no room, no right ---------------------------------------------------------------------------------------------


def assert_refused(told: dict, path: Path, why: str) -> None:
    assert told["error"] == "StoreError", told
    assert "\n" not in told["message"]
    assert str(path) in told["message"]
    assert why in told["message"]


@pytest.mark.parametrize("what", CHANGES)
def test_a_disk_that_is_full_from_any_operation_on_loses_nothing(server, start, after, tmp_path, what):
    count = server.ask(copied(start, tmp_path), what)["count"]
    for at in range(1, count + 1):
        path = copied(start, tmp_path)
        told = server.ask(path, what, at=at, how="full")
        changed = manifest(path) != manifest(start)
        assert whole(path) == after[what if changed else ""]
        if told["error"] is not None:  # else only sweeping up failed
            assert_refused(told, path, "No space left on device")
            assert ("was changed" in told["message"]) == changed
        if not changed:
            change(path, what)
        assert whole(path) == after[what]


@pytest.mark.parametrize("size", [0, 1, 200, 330, 800, 1000, 1600])
def test_a_limit_on_file_sizes_is_told_in_a_line_and_loses_nothing(server, start, after, tmp_path, size):
    path = copied(start, tmp_path)
    assert_refused(server.ask(path, "learn c 3", at=size, how="EFBIG"), path, "File too large; free disk space")
    assert whole(path) == after[""]
    change(path, "learn c 3")
    assert_nothing_left_over(path)


def test_a_really_full_disk_is_told_in_a_line_and_tasks_are_learned_when_there_is_room(
    server, start, after, small_disk
):
    path, ballast = copied(start, small_disk), small_disk / "ballast"
    refused = 0
    for left in range(0, 32768, 2048):
        ballast.write_bytes(b"")
        with ballast.open("wb", buffering=0) as file, suppress(OSError):  # until there is no space left
            while file.write(bytes(2048)):
                pass
        os.truncate(ballast, max(0, ballast.stat().st_size - left))
        told = server.ask(path, "learn c 3")
        if told["error"]:
            refused += 1
            assert_refused(told, path, "No space left on device; free disk space and try again")
            assert manifest(path) == manifest(start)
            assert whole(path) == after[""]
        else:
            assert whole(path) == after["learn c 3"]
            path = copied(start, small_disk)
    assert refused > 3
    ballast.unlink()
    change(path, "learn c 3")
    assert whole(path) == after["learn c 3"]


def test_a_read_only_file_system_is_read_and_not_changed(server, start, after, small_disk):
    path = copied(start, small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for what in CHANGES:
        assert_refused(server.ask(path, what), path, "Read-only file system")
    assert whole(path) == after[""]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    change(path, "learn c 3")
    assert whole(path) == after["learn c 3"]


@pytest.mark.parametrize("part", ["", "files"])
def test_a_directory_without_the_right_to_write_is_read_and_not_changed(server, start, after, part):
    with tempfile.TemporaryDirectory() as where:  # where others than root may enter
        path, options = copied(start, Path(where)), {}
        if os.geteuid() == 0:  # whom no mode stops
            options = {"user": NOBODY}
            for each in [Path(where), path, *path.rglob("*")]:
                os.chown(each, NOBODY, NOBODY)
        (path / "lock").unlink()
        (path / part).chmod(0o555)
        for what in ("rollback", "learn c 3", "remove a"):
            assert_refused(server.ask(path, what, **options), path, "Permission denied")
            assert manifest(path) == manifest(start)
        assert whole(path) == after[""]
        (path / part).chmod(0o755)
        assert server.ask(path, "learn c 3", **options)["error"] is None
        assert whole(path) == after["learn c 3"]


# --- several at once -----------------------------------------------------------------------------------------------


def test_a_second_writer_is_told_who_writes_and_changes_nothing(server, start, after, tmp_path):
    path = copied(start, tmp_path)
    pid = server.ask(path, "learn c 3", at=7, how="SIGSTOP")["stopped"]
    try:
        for what in ("learn e 5", "remove a", "rollback", "rename a z"):
            with pytest.raises(StoreError, match=f"is in use by process {pid}: try again") as error:
                change(path, what)
            assert "\n" not in str(error.value)
        assert manifest(path) == manifest(start)
        assert whole(path) == after[""]
    finally:
        told = server.go_on(pid)
    assert told["error"] is None
    assert whole(path) == after["learn c 3"]
    change(path, "learn e 5")
    assert [task.name for task in exssnet.Model.open(path).tasks] == ["a", "b", "c", "e"]


def test_a_killed_writer_leaves_no_lock(server, start, tmp_path):
    path = copied(start, tmp_path)
    pid = server.ask(path, "learn c 3", at=7, how="SIGSTOP")["stopped"]
    os.kill(pid, signal.SIGKILL)
    assert server.go_on(pid)["killed"]
    change(path, "learn c 3")


def test_readers_and_verify_see_one_whole_state_while_another_process_writes(server, start, tmp_path):
    path = copied(start, tmp_path)
    steps = ["learn c 3", "learn d 4", "remove c", "learn c 5", "rollback", "learn c 6", "remove d", "learn d 7"]
    steps += ["remove d", "rename c e", "rollback", "remove c"]  # and tasks a and b are left, as at first
    known = {state(path)}
    for what in steps:
        change(path, what)
        known.add(whole(path))
    path, seen = copied(start, tmp_path), set()
    server.start(path, *steps * 8)
    while not server.answered():
        found = state(path)
        assert found in known
        seen.add(found)
        assert verify(Folder(path)).problems == ()
    assert server.answer()["error"] is None
    assert len(seen) > 2


@pytest.mark.parametrize("used", ["not at all", "its list of tasks", "its model"])
@pytest.mark.parametrize("steps", ["learn c 3", "remove a,learn a 7", "rename a z,remove b", "rollback,learn b 8"])
def test_a_model_opened_before_a_change_never_mixes_two_states(start, tmp_path, used, steps):
    path = copied(start, tmp_path)
    model = exssnet.Model.open(path)
    if used == "its list of tasks":
        assert [task.name for task in model.tasks] == ["a", "b"]
    elif used == "its model":
        assert [task.name for task in model.model.tasks] == ["a", "b"]
    old = state(path)
    for what in steps.split(","):
        change(path, what)
    listed = [task.name for task in model.tasks]
    if used == "its list of tasks" and "," in steps:  # its tensors were swept away by the second change
        with pytest.raises(StoreError, match="has changed since it was read: open it again"):
            answers(model)
        return
    found = answers(model)
    assert found in ((old,) if used == "its model" else (old, state(path)))
    assert listed == [name for name, _, _ in found]


@pytest.mark.parametrize("used", [False, True])
def test_an_old_object_changes_the_state_that_is_there_now(start, tmp_path, used):
    path = copied(start, tmp_path)
    model = exssnet.Model.open(path)
    if used:
        assert len(model.model.tasks) == 2
    for what in ("rollback", "learn c 3"):
        change(path, what)
    model.learn("b", examples(2), epochs=(1, 1))
    assert [name for name, _, _ in whole(path)] == ["a", "c", "b"]
    model = exssnet.Model.open(path)
    if used:
        assert len(model.model.tasks) == 3
    change(path, "remove a")
    change(path, "learn e 5")
    with pytest.raises(ExssnetError, match="no task 'a'"):
        model.remove("a")
    model = exssnet.Model.open(path)
    change(path, "learn f 6")
    model.remove("f")
    assert [name for name, _, _ in whole(path)] == ["c", "b", "e"]
