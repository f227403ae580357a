"""Model directories with several tasks and a way back, to be damaged."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.second_process import change, examples
from tests.store.tamper import KINDS, own_network

import exssnet


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


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, directories: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(directories[request.param], tmp_path / "model"))


@pytest.fixture
def removed(directories: dict[str, Path], tmp_path: Path) -> Path:
    """Tasks a and c; b was removed."""
    return Path(shutil.copytree(directories["removed"], tmp_path / "model"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"needs the right to mount a file system: {made.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)
