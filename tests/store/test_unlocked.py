"""Where no lock keeps processes apart, a change is made on the state that it began from, or refused: none is lost."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.second_process import Server, State, change, whole

from exssnet.errors import StoreError
from exssnet.store.directory import Folder
from exssnet.store.writer import Writer

pytestmark = pytest.mark.slow

PAIRS = [
    ("learn c 3", "learn e 5"), ("learn c 3", "rollback"), ("remove a", "remove b"), ("rename b d", "rename a z"),
    ("rollback", "learn e 5"), ("rollback", "remove a"),
]  # fmt: skip


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


def after(start: Path, where: Path, *changes: str) -> State:
    """What the directory holds after changes that nothing disturbs."""
    path = Path(shutil.copytree(start, where))
    for what in changes:
        change(path, what)
    return whole(path)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_change_that_another_one_overtakes_at_any_operation_is_refused_or_was_made_before(
    server, start, tmp_path, first, second
):
    """The first stops at an operation, the lock is deleted, the second is made, and the first goes on."""
    alone, both = after(start, tmp_path / "alone", second), after(start, tmp_path / "both", first, second)
    turned = after(start, tmp_path / "turned", second, first)
    seen = set()
    count = server.ask(Path(shutil.copytree(start, tmp_path / "count")), first)["count"]
    for at in range(1, count + 1):
        path = Path(shutil.copytree(start, tmp_path / str(at)))
        pid = server.ask(path, first, at=at, how="SIGSTOP")["stopped"]
        (path / "lock").unlink(missing_ok=True)
        committed = Folder(path).manifest_bytes() != Folder(start).manifest_bytes()
        change(path, second)
        told = server.go_on(pid)
        if told["error"] is None:
            assert whole(path) == (both if committed else turned)
            seen.add("first" if committed else "second, before the first had begun")
        else:
            assert told["error"] == "StoreError", told
            meanwhile = "was changed by another process, and this change was not made"
            waited = "is in use by"  # stopped before it had the lock, for longer than it waits for one
            assert meanwhile in told["message"] or waited in told["message"]
            assert whole(path) == alone
            seen.add("second, and the first was refused")
        change(path, "learn f 6")
        assert "f" in [name for name, _, _ in whole(path)]
    assert len(seen) == 3


def test_of_four_processes_that_learn_at_once_without_a_lock_no_learned_task_is_lost(server, start, tmp_path):
    path = Path(shutil.copytree(start, tmp_path / "model"))
    asked = [[f"learn t{number} {number + 10}"] for number in range(4)]
    done = [told["done"] for told in server.ask_together(path, *asked, unlocked=True)]
    learned = {what.split()[1] for each in done for what in each}
    assert learned
    assert {name for name, _, _ in whole(path)} == {"a", "b"} | learned


def test_of_many_changes_at_once_without_a_lock_each_is_made_or_refused(server, start, tmp_path):
    path = Path(shutil.copytree(start, tmp_path / "model"))
    before = Folder(path).manifest().number
    asked = [
        [what for _ in range(40) for what in (f"rename {one} {one}{one}", f"rename {one}{one} {one}")] for one in "ab"
    ]
    asked += [[what for n in range(12) for what in (f"learn t{one}{n} {n}", f"remove t{one}{n}")] for one in range(2)]
    told = server.ask_together(path, *asked, unlocked=True, go_on=True)
    made = sum(len(each["done"]) for each in told)
    assert Folder(path).manifest().number == before + made
    assert made > 20
    whole(path)


def test_of_four_processes_that_make_a_directory_at_once_without_a_lock_one_does(server, tmp_path):
    for number in range(5):
        path = tmp_path / str(number)
        done = [told["done"] for told in server.ask_together(path, *[["create"]] * 4, unlocked=True)]
        assert sorted(map(len, done)) == [0, 0, 0, 1]
        assert whole(path) == ()


@pytest.mark.parametrize("first", ["learn c 3", "rollback"])
def test_a_change_is_refused_also_where_the_one_that_overtook_it_was_killed_at_any_operation(
    server, start, tmp_path, first
):
    """Without having swept away what the first has written."""
    second = "learn e 5"
    alone, made = after(start, tmp_path / "alone", second), after(start, tmp_path / "made", first)
    link = 1 + server.ask(Path(shutil.copytree(start, tmp_path / "first")), first)["events"].index("os.link")
    count, refused = server.ask(Path(shutil.copytree(start, tmp_path / "second")), second)["count"], 0
    for at in range(1, count + 1):
        path = Path(shutil.copytree(start, tmp_path / str(at)))
        pid = server.ask(path, first, at=link, how="SIGSTOP")["stopped"]
        (path / "lock").unlink()
        assert server.ask(path, second, at=at)["killed"]
        if server.go_on(pid)["error"] is None:
            assert whole(path) == made
        else:
            assert whole(path) == alone
            refused += 1
        change(path, "learn f 6")
        assert "f" in [name for name, _, _ in whole(path)]
    assert 0 < refused < count


@pytest.mark.parametrize("others", [["learn e 5"], ["learn e 5", "rename e g"]])
@pytest.mark.parametrize("late", [False, True])
def test_a_change_is_made_also_where_others_go_on_from_it_before_its_process_does(
    start, tmp_path, monkeypatch, others, late
):
    """Also where one of them has begun before it, and makes its link where that of the first was."""
    path, real, left = Path(shutil.copytree(start, tmp_path / "model")), Writer._is_too_late, list(others)

    def overtaken(self: Writer, following: Path, content: bytes) -> bool:
        if not left:
            return real(self, following, content)
        while left:
            (path / "lock").unlink()
            change(path, left.pop(0))
        if late:
            following.write_bytes((start / "manifest.json").read_bytes())
        return real(self, following, content)

    wanted = after(start, tmp_path / "wanted", "learn c 3", *others)
    monkeypatch.setattr(Writer, "_is_too_late", overtaken)
    change(path, "learn c 3")
    assert whole(path) == wanted


def test_a_process_that_sweeps_late_leaves_a_change_that_is_being_committed(server, start, tmp_path):
    path = Path(shutil.copytree(start, tmp_path / "model"))
    events = server.ask(Path(shutil.copytree(start, tmp_path / "count")), "learn c 3")["events"]
    sweeping = 1 + len(events) - events[::-1].index("fsync")  # after the last one all that is left is to sweep
    late = server.ask(path, "learn c 3", at=sweeping, how="SIGSTOP")["stopped"]
    (path / "lock").unlink()
    linked = server.ask(path, "rename a z", at=["os.rename", "manifest.json"], how="SIGSTOP")
    assert server.go_on(late)["error"] is None
    assert server.go_on(linked["stopped"])["error"] is None
    assert [name for name, _, _ in whole(path)] == ["z", "b", "c"]


def test_what_a_killed_process_left_does_not_undo_a_rollback(start, tmp_path):
    """A link that was made too late, and not taken back."""
    path = Path(shutil.copytree(start, tmp_path / "model"))
    left = Folder(path).after(Folder(path).manifest_bytes())
    change(path, "rename a z")
    left.write_bytes((path / "manifest.json").read_bytes())
    change(path, "rollback")
    assert whole(path) == whole(start)


def test_without_hard_links_too_a_change_that_is_overtaken_is_refused(server, start, tmp_path):
    events = server.ask(Path(shutil.copytree(start, tmp_path / "count")), "learn c 3", linkless=True)["events"]
    for at in range(1, len(events)):
        path = Path(shutil.copytree(start, tmp_path / str(at)))
        pid = server.ask(path, "learn c 3", at=at, how="SIGSTOP", linkless=True)["stopped"]
        (path / "lock").unlink(missing_ok=True)
        assert server.ask(path, "rename a z", linkless=True)["error"] is None
        told = server.go_on(pid)
        assert [name for name, _, _ in whole(path)] == ["z", "b", *["c"] * (told["error"] is None)]


def test_without_hard_links_a_change_that_is_being_committed_is_not_overwritten(server, start, tmp_path):
    path, moments = Path(shutil.copytree(start, tmp_path / "model")), {"how": "SIGSTOP", "linkless": True}
    events = server.ask(Path(shutil.copytree(start, tmp_path / "count")), "learn c 3", linkless=True)["events"]
    fourth_last = [at for at, event in enumerate(events, start=1) if event == "fsync"][-4]  # all is written
    written = server.ask(path, "learn c 3", at=fourth_last, **moments)["stopped"]
    (path / "lock").unlink()
    committed = server.ask(path, "rename a z", at=["os.rename", "manifest.json"], **moments)["stopped"]
    told = server.go_on(written)
    assert "this change was not made" in told["message"]
    assert server.go_on(committed)["error"] is None
    assert [name for name, _, _ in whole(path)] == ["z", "b"]


def test_a_sweep_that_cannot_read_the_manifest_again_removes_nothing(start, tmp_path, monkeypatch):
    path, real, calls = Path(shutil.copytree(start, tmp_path / "model")), Writer._named, []
    before = {file.name for file in (path / "files").iterdir()}

    def unreadable(self: Writer) -> set[str]:
        calls.append(1)
        if len(calls) == 2:
            raise StoreError("manifest.json cannot be read")
        return real(self)

    monkeypatch.setattr(Writer, "_named", unreadable)
    change(path, "learn c 3")
    assert len(calls) == 2
    assert before <= {file.name for file in (path / "files").iterdir()}
    assert [name for name, _, _ in whole(path)] == ["a", "b", "c"]


@pytest.mark.parametrize("what", ["learn c 3", "remove a", "rename b d", "rollback"])
def test_a_file_system_without_hard_links_is_changed_too(server, start, tmp_path, monkeypatch, what):
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    wanted = after(start, tmp_path / "wanted", what)
    monkeypatch.setattr(os, "link", refused)
    assert after(start, tmp_path / "model", what) == wanted
    change(tmp_path / "new", "create")
    assert whole(tmp_path / "new") == ()
