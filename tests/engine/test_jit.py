"""What numba has compiled is kept for other processes; damage to it costs time and nothing else."""

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exssnet
from exssnet.io.disk import cache_folder

pytest.importorskip("numba", reason="needs numba")

MODULE = """
import numpy as np
from exssnet.engine.cpu.jit import jit

@jit
def _inner(x, factor):
    total = 0.0
    for i in range(len(x)):
        total += factor * x[i]
    return total

@jit
def outer(x):
    return _inner(x, FACTOR) + len(x)
"""
PROGRAM = "import numpy as np, kernels as k; print(k.outer(np.arange(9.0)), *k.outer.stats.cache_hits.values())"
LEARNS = """
import torch
torch.set_num_threads(1)
import exssnet
from exssnet.engine.cpu.selection import _write
from exssnet.models import build
draw = torch.Generator().manual_seed(0)
y = torch.arange(64) % 2
x = torch.randn(64, 12, generator=draw) + y[:, None]
model = exssnet.Model(build("lenet-300-100", (12,), 2, 0.2), density=0.3)
model.learn("a", (x, y), epochs=(2, 2))
print(model.tasks[0].digest, *_write.stats.cache_hits.values())
"""


def child(program: str, cache: Path, *path: Path) -> list[str]:
    """What a new process prints, which must end well and without a word of complaint."""
    where = os.pathsep.join(map(str, [*path, Path(exssnet.__file__).parents[1]]))
    environment = os.environ | {"EXSSNET_CACHE": str(cache), "PYTHONPATH": where, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of two kernels, and a cache in which they are."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "module").mkdir()
    (folder / "module/kernels.py").write_text(MODULE.replace("FACTOR", "2.0"))
    assert child(PROGRAM, folder / "cache", folder / "module") == ["81.0"]
    return folder


@pytest.fixture
def kernels(made: Path) -> Path:
    return made / "module"


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "cache", tmp_path / "cache")
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "numba").iterdir())


def signed(held: bytes) -> bytes:
    return hashlib.sha256(held).digest() + held


def with_zeros(content: bytes, place: int) -> bytes:
    """Of the machine code, that is: behind the header of what the compiler wrote."""
    return content[:place] + bytes(300) + content[place + 300 :]


DAMAGE = {
    "empty": lambda content: b"",
    "truncated in the digest": lambda content: content[:20],
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "garbage": lambda content: bytes(range(256)) * 40,
    "zeros": lambda content: bytes(len(content)),
    "a flipped bit": lambda content: content[:-900] + bytes([content[-900] ^ 1]) + content[-899:],
    "no header of the code": lambda content: content.replace(b"\x7fELF", b"\0\0\0\0"),
    "other code": lambda content: with_zeros(content, content.find(b"\x7fELF") + 64),
    "another pickle": lambda content: signed(pickle.dumps("not code")),
    "a pickle of as many parts": lambda content: signed(pickle.dumps((None,) * 9)),
    "no pickle": lambda content: signed(b"not a pickle"),
    "a pickle of what is not there": lambda content: signed(b"cno_such_module\nthing\n."),
}  # fmt: skip


def is_sound(file: Path) -> bool:
    return hashlib.sha256(file.read_bytes()[32:]).digest() == file.read_bytes()[:32]


def test_what_one_process_has_compiled_another_one_reads(kernels, cache):
    before = {file: file.stat().st_mtime_ns for file in kept(cache)}
    assert child(PROGRAM, cache, kernels) == ["81.0", "1"]
    assert {file: file.stat().st_mtime_ns for file in kept(cache)} == before


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_compiled_and_written_again(kind, kernels, cache):
    for file in kept(cache):
        whole = file.read_bytes()
        file.write_bytes(DAMAGE[kind](whole))
        assert file.read_bytes() != whole
    assert child(PROGRAM, cache, kernels) == ["81.0"]
    assert all(is_sound(file) and len(file.read_bytes()) > 1000 for file in kept(cache))


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(kernels, cache):
    for file in kept(cache):
        file.unlink()
        os.mkfifo(file)
    assert child(PROGRAM, cache, kernels) == ["81.0"]
    assert all(is_sound(file) for file in kept(cache))


def test_a_folder_in_the_place_of_a_file_is_passed_over(kernels, cache):
    for file in kept(cache):
        file.unlink()
        (file / "inside").mkdir(parents=True)
    program = f"import warnings; warnings.simplefilter('ignore'); {PROGRAM}"
    assert child(program, cache, kernels) == ["81.0"]


@pytest.mark.slow
def test_learning_goes_on_whatever_happened_to_the_files_and_leaves_none_in_the_package(tmp_path):
    package, cache = tmp_path / "package/exssnet", tmp_path / "cache"
    shutil.copytree(Path(exssnet.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (digest,) = child(LEARNS, cache, package.parent)
    assert child(LEARNS, cache, package.parent) == [digest, "1"]
    for file, damage in zip(kept(cache), [*DAMAGE.values()] * 3, strict=False):
        file.write_bytes(damage(file.read_bytes()))
    assert child(LEARNS, cache, package.parent) == [digest]
    assert not [*package.rglob("*.nb?")]


def test_a_folder_that_cannot_be_written_is_told_once_and_kernels_are_compiled(kernels, tmp_path):
    cache = tmp_path / "a file"
    cache.write_text("no folder")
    program = f"""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {PROGRAM}
print([str(warning.message) for warning in caught])
"""
    first, *told = child(program, cache, kernels)
    assert first == "81.0"
    assert " ".join(told).count("cannot keep compiled kernels in") == 1
    assert "set EXSSNET_CACHE to a writable folder" in " ".join(told)


def test_kernels_whose_source_has_changed_are_compiled_again(cache, tmp_path):
    for factor, answer in (("3.0", ["117.0"]), ("2.0", ["81.0", "1"])):  # the second as it was when it was compiled
        (tmp_path / "kernels.py").write_text(MODULE.replace("FACTOR", factor))
        assert child(PROGRAM, cache, tmp_path) == answer


def test_the_folder_is_the_users_as_the_platform_has_it(monkeypatch):
    for name in ("EXSSNET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = {}
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    for system in ("linux", "darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        found[system] = cache_folder()
    home = Path.home()
    assert found == {
        "linux": home / ".cache/exssnet", "darwin": home / "Library/Caches/exssnet", "win32": Path("/local/exssnet"),
    }  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", "/given")
    assert cache_folder() == Path("/given/exssnet")
    monkeypatch.setenv("EXSSNET_CACHE", "~/own")
    assert cache_folder() == home / "own"
