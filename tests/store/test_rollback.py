"""The way back: one change is undone, once, to the byte."""

import pytest
from tests.store.second_process import change, state, whole
from tests.store.tamper import hit

from exssnet.errors import StoreError
from exssnet.store.verify import ROLLBACK


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
        with pytest.raises(StoreError, match="no change to undo") as error:
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
    with pytest.raises(StoreError, match="has no change to undo"):
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
