"""What a directory from somebody else could do to other files, and what becomes of a first task that is not learned."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from exssnet import Model, StoreError
from exssnet.store.change import Change
from exssnet.store.directory import Folder
from exssnet.store.format.card import content, parse
from exssnet.store.stored_model import StoredModel
from exssnet.store.verify import verify


def learned(path, name="a"):
    model = Model.create(path, "lenet-300-100", input=(6,), width=0.1) if not path.exists() else Model.open(path)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    model.learn(name, (x, (x[:, 0] > 0).long()), epochs=(1, 1))
    return model


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    model = learned(tmp_path / "model")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "model" / "lock").unlink()
    (tmp_path / "model" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match="lock"):
        model.rename("a", "b")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_a_lock_that_is_not_a_regular_file_is_refused(tmp_path, kind):
    model = learned(tmp_path / "model")
    lock = tmp_path / "model" / "lock"
    lock.unlink()
    os.mkfifo(lock) if kind == "FIFO" else lock.mkdir()
    with pytest.raises(StoreError, match="lock is not a regular file: remove it"):
        model.rename("a", "b")
    assert [task.name for task in Model.open(tmp_path / "model").tasks] == ["a"]


OPENED = """
import sys
from pathlib import Path
from exssnet import Model, StoreError
from exssnet.store.directory import Folder
from exssnet.store.verify import verify
for path in sys.argv[1:]:
    try:
        Model.open(path).predict([[0.0] * 6], "a")
    except StoreError as error:
        print(error)
    print(len(verify(Folder(Path(path))).problems))
"""


@pytest.mark.parametrize("file", ["manifest", "card", "tensors"])
def test_what_is_not_a_regular_file_of_usual_size_is_told_in_a_line(tmp_path, file):
    learned(tmp_path / "model")
    (entry,) = Folder(tmp_path / "model").manifest().tasks
    name = {"manifest": "manifest.json", "card": f"files/{entry.card.name}", "tensors": f"files/{entry.tensors.name}"}
    make = {
        "is a FIFO": os.mkfifo,
        "is a link out of": lambda path: path.symlink_to("/dev/zero"),
        "has 1,000,000,000,000 bytes": lambda path: path.touch() or os.truncate(path, 10**12),
    }
    for number, put in enumerate(make.values()):
        copy = shutil.copytree(tmp_path / "model", tmp_path / str(number))
        (copy / name[file]).unlink()
        try:
            put(copy / name[file])
        except OSError:
            pytest.skip("needs a file system with sparse files of 1 TB")
    done = subprocess.run(  # a process of its own: one that waits can be given up
        [sys.executable, "-c", OPENED, *(str(tmp_path / str(number)) for number in range(len(make)))],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    said = done.stdout.splitlines()
    assert len(said) == 2 * len(make)
    for line, problems, words in zip(said[::2], said[1::2], make, strict=True):
        assert f"{name[file]} {words}" in line
        assert problems == "1"


def test_files_that_are_a_link_are_not_swept(tmp_path):
    learned(tmp_path / "theirs")
    mine = learned(tmp_path / "mine")
    before = sorted(file.name for file in (tmp_path / "theirs" / "files").iterdir())
    for file in (tmp_path / "mine" / "files").iterdir():
        (tmp_path / "theirs" / "files" / file.name).write_bytes(file.read_bytes())
        file.unlink()
    (tmp_path / "mine" / "files").rmdir()
    (tmp_path / "mine" / "files").symlink_to(tmp_path / "theirs" / "files")
    with pytest.raises(StoreError, match="is a link"):
        mine.rename("a", "b")
    assert set(before) <= {file.name for file in (tmp_path / "theirs" / "files").iterdir()}


def test_a_first_task_that_fails_leaves_no_directory_and_spoils_none(tmp_path):
    path = tmp_path / "new" / "model"
    x = torch.randn(40, 6)
    model = StoredModel.begin(path, "lenet-300-100", (6,), width=0.1)
    assert not path.exists()
    with pytest.raises(ValueError, match="lr is -1"):
        model.learn("a", (x, (x[:, 0] > 0).long()), epochs=(1, 1), lr=-1)
    assert not (tmp_path / "new").exists()
    learned(path, "b")  # another process was faster
    with pytest.raises(StoreError, match="is already a model directory"):
        model.learn("a", (x, (x[:, 0] > 0).long()), epochs=(1, 1))
    assert [task.name for task in Model.open(path).tasks] == ["b"]


KILLED = """
import os, sys, time, torch
from exssnet.store.stored_model import StoredModel
link = os.link
def slow(source, to):
    if to.name == "manifest.json":
        print("now", flush=True)
        time.sleep(60)
    link(source, to)
os.link = slow
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
StoredModel.begin(sys.argv[1], "lenet-300-100", (6,), width=0.1).learn("a", (x, (x[:, 0] > 0).long()), epochs=(1, 1))
"""


def test_a_first_task_killed_before_its_manifest_can_be_learned_again(tmp_path):
    path = tmp_path / "model"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list((path / "files").iterdir())  # it had written all but the manifest
    assert not Folder(path).exists()
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    model = StoredModel.begin(path, "lenet-300-100", (6,), width=0.1)
    model.learn("a", (x, (x[:, 0] > 0).long()), epochs=(1, 1))
    assert verify(Folder(path)).verified
    assert not (path / "unfinished").exists()
    assert len(list((path / "files").iterdir())) == 2


def test_a_directory_that_lost_its_manifest_is_not_taken_for_an_unfinished_one(tmp_path):
    learned(tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    before = {file: file.read_bytes() for file in (tmp_path / "model" / "files").iterdir()}
    with pytest.raises(StoreError, match="has tasks but no manifest"):
        Model.create(tmp_path / "model", "lenet-300-100", input=(6,), width=0.1)
    assert {file: file.read_bytes() for file in (tmp_path / "model" / "files").iterdir()} == before


def test_a_changed_label_is_found_even_with_new_digests(tmp_path):
    model = learned(tmp_path / "model")
    with Change(model) as change:
        (entry,) = model.manifest.tasks
        card = parse(content(model.card("a")), "card")
        change.commit("lie", [change.with_card(entry, card | {"labels": card["labels"][::-1]})])
    report = verify(Folder(tmp_path / "model"))
    assert [problem.tasks for problem in report.problems] == [("a",)]
