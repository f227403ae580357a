"""An export is atomic: whatever ends it, its name has all of it or nothing, and the same command works again."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store.second_process import Server, change, exported, whole
from tests.store.test_full_disk import fill

from exssnet import Model, StoreError

pytestmark = pytest.mark.slow

FORMS = ("safetensors", "torch", "model")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as found:
        yield found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for what in ("create", "learn a 1", "learn b 2"):
        change(tmp_path / "model", what)
    return tmp_path / "model"


def shown(path: Path) -> list[str]:
    """The names that `ls` shows of what was exported."""
    folder = exported(path).parent
    return sorted(file.name for file in folder.iterdir() if file.name[0] != ".") if folder.exists() else []


def require_whole(path: Path, form: str, tmp_path: Path) -> None:
    out = exported(path)
    if form == "model":
        assert whole(out) == whole(path)[:1]
        return
    Model.open(path).export("a", tmp_path / "again/a", form)
    for name in ("a", "a.json"):
        assert (out.parent / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    shutil.rmtree(tmp_path / "again")


@pytest.mark.parametrize("form", FORMS)
def test_a_kill_at_any_writing_operation_leaves_nothing_or_all_and_the_export_can_be_repeated(
    server, path, tmp_path, form
):
    count = server.ask(path, f"export {form}")["count"]
    require_whole(path, form, tmp_path)
    seen = set()
    for at in range(1, count + 1):
        shutil.rmtree(exported(path).parent)
        assert server.ask(path, f"export {form}", at=at)["killed"]
        found = exported(path).exists()
        seen.add(found)
        if not found:
            change(path, f"export {form}")
        require_whole(path, form, tmp_path)
    assert False in seen


@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_is_full_from_any_operation_on_leaves_nothing(server, path, tmp_path, form):
    count = server.ask(path, f"export {form}")["count"]
    refused = 0
    for at in range(1, count + 1):
        shutil.rmtree(exported(path).parent)
        told = server.ask(path, f"export {form}", at=at, how="full")
        if told["error"] is not None:
            refused += 1
            assert told["error"] == "StoreError"
            assert told["message"].startswith(f"{exported(path)} cannot be written")
            assert shown(path) == []
            change(path, f"export {form}")
        require_whole(path, form, tmp_path)
    assert refused


def test_room_for_the_weights_but_not_for_their_description_leaves_nothing(path, small_disk):
    for room in range(0, 65536, 4096):
        fill(small_disk, room)
        with suppress(StoreError):
            Model.open(path).export("a", small_disk / "a")
            break
        assert [file.name for file in small_disk.iterdir()] == ["ballast"]
    assert room
    assert (small_disk / "a.json").exists()


def test_a_description_that_is_another_one_s_is_kept(path):
    out = exported(path)
    out.parent.mkdir()
    described = out.with_name("a.json")
    for others in ("mine", "{}"):
        described.write_text(others)
        with pytest.raises(ValueError, match="exists: choose another name"):
            Model.open(path).export("a", out)
        assert (described.read_text(), shown(path)) == (others, ["a.json"])
    described.unlink()
    described.symlink_to("nowhere")
    with pytest.raises(ValueError, match="exists: choose another name"):
        Model.open(path).export("a", out)
