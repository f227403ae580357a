"""Directories that earlier versions wrote are read, answer as they did, and can be changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.store.make_golden import answers, own_network
from tests.store.small import learn
from tests.store.tamper import rewrite
from torch import nn

from exssnet import Model
from exssnet.errors import StoreError
from exssnet.store.directory import Folder
from exssnet.store.verify import verify

GOLDEN = Path(__file__).with_name("golden")
WANTED = json.loads((GOLDEN / "answers.json").read_text())


def module_of(kind: str) -> nn.Module | None:
    return own_network() if kind == "own" else None


@pytest.fixture(params=["built-in", "own"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / kind, tmp_path / "model"))


def same_answers(found: dict[str, list[list[float]]], kind: str) -> bool:
    """Up to how another machine rounds; the digests are exact."""
    wanted = WANTED[kind]
    return list(found) == list(wanted) and all(
        torch.allclose(torch.tensor(found[name]), torch.tensor(wanted[name]), atol=1e-5) for name in wanted
    )


def test_a_directory_of_format_1_verifies_and_answers_as_it_did(path, kind):
    report = verify(Folder(path), module_of(kind))
    assert report.verified, report.problems
    assert report.tasks is not None
    assert same_answers(answers(Model.open(path, module_of(kind))), kind)


def test_the_golden_directories_hold_every_part_of_the_format():
    """A part that none of them has would not be held to anything."""
    built_in, own = (Model.open(GOLDEN / place) for place in ("built-in", "own"))
    assert built_in.manifest.base_file is None
    assert own.manifest.base_file is not None
    assert any(entry.predictor for entry in own.manifest.tasks)
    assert any(learned.override is not None for learned in built_in.model.network.tasks.values())
    assert Folder(GOLDEN / "own").note((GOLDEN / "own" / "manifest.json").read_bytes()) is not None
    assert built_in.manifest.before is not None


def test_a_directory_of_format_1_can_be_changed(path, kind):
    model = Model.open(path, module_of(kind))
    first, *_ = model.tasks
    learn(model, "new", 20)
    model.remove(first.name)
    assert verify(Folder(path), module_of(kind)).verified
    left = {name: found for name, found in answers(model).items() if name != "new"}
    assert same_answers({first.name: WANTED[kind][first.name]} | left, kind)


def test_names_of_a_later_version_are_left_alone_and_kept(path, kind):
    entries = json.loads((path / "manifest.json").read_text())["tasks"]

    def add(found):
        found["later"] = {"a": 1}
        found["base"]["later"] = 3
        found["tasks"][0]["later"] = None

    rewrite(path, add)
    model = Model.open(path, module_of(kind))
    assert same_answers(answers(model), kind)
    model.rename(entries[-1]["name"], "renamed")
    assert json.loads((path / "manifest.json").read_text())["base"]["later"] == 3


def test_a_later_format_is_refused_politely(path):
    rewrite(path, lambda found: found.update(format=2, exssnet="9.0"))
    with pytest.raises(StoreError, match=r"has format 2, from exssnet 9\.0; this version reads 1: upgrade"):
        Model.open(path)
