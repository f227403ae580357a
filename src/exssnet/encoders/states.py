"""The cache of token states: each text goes through an encoder once, on one machine, for every method, epoch and seed.

The texts of a data set are encoded in shards. A shard is one safetensors file, named by what decides its content: the
encoder's digest (weights, tokenizer, layer, limit) and the texts. It holds the states end to end in fp16, without
padding, and is mapped into memory. So a killed process leaves the shards it finished, several processes share the work,
and a file that is damaged is noticed by its SHA-256 when it is opened and is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exssnet.encoders.base import Encoder, Text, TokenStates
from exssnet.errors import InputError
from exssnet.io.disk import cache_folder, write_atomic

SHARD = 512  # texts
VARIABLE = "EXSSNET_CACHE_GB"
USUAL_GB = 50.0
GB = 10**9
WAIT = 0.05  # seconds between two looks for shards that other processes are making
STALE_SECONDS = 3600  # a partial file this old was left by a killed process
Progress = Callable[[int, int], None]  # texts that are there, and all of them


@dataclass(frozen=True)
class Shard:
    """States end to end, [tokens, width], and where each text's end."""

    states: TokenStates
    ends: NDArray[np.int64]
    cut: int


class States:
    """Token states by row, in memory or mapped from disk."""

    def __init__(self, shards: Sequence[Shard], width: int, encoded: int = 0) -> None:
        self.width = width
        self.encoded = encoded  # texts that had to go through the encoder now
        self.cut = sum(shard.cut for shard in shards)  # texts that were longer than the encoder takes
        self.lengths = np.concatenate([np.diff(shard.ends, prepend=0) for shard in shards] or [np.zeros(0, np.int64)])
        self._rows = [
            (shard.states, start, end) for shard in shards for start, end in pairwise([0, *shard.ends.tolist()])
        ]

    @classmethod
    def joined(cls, parts: Sequence[States]) -> States:
        """The rows of several, one after the other."""
        one = cls([], parts[0].width, sum(part.encoded for part in parts))
        one.cut = sum(part.cut for part in parts)
        one.lengths = np.concatenate([part.lengths for part in parts])
        one._rows = [row for part in parts for row in part._rows]
        return one

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> TokenStates:
        """The states of one text, [tokens, width]: a view."""
        states, start, end = self._rows[row]
        return states[start:end]


@dataclass(frozen=True)
class Kept:
    """What the cache holds of one encoder."""

    encoder: str
    width: int
    shards: int
    texts: int
    size: int  # bytes
    used: float  # when one of them was last asked for, in seconds since 1970


class StateCache:
    """Token states on disk, below a folder, up to a size: then what was not used for longest goes."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._open: dict[Path, Shard] = {}  # verified once in a process
        self._told: set[Path] = set()  # what of it was said that it is too large, by its first shard

    def states(self, encoder: Encoder, texts: Sequence[Text], progress: Progress | None = None) -> States:
        """The states of these texts; those that are not there yet are encoded now."""
        parts = [texts[start : start + SHARD] for start in range(0, len(texts), SHARD)]
        folder = self.folder / encoder.digest[:24]
        files = [folder / f"{_key(encoder, part)}.safetensors" for part in parts]
        made: dict[int, Shard] = {}
        for number, file in enumerate(files):
            shard = self._read(file)
            if shard is not None and len(shard.ends) == len(parts[number]):
                made[number] = shard
        missing = [number for number in range(len(parts)) if number not in made]
        ready = sum(len(parts[number]) for number in made)
        encoded = 0
        if missing and progress is not None:
            progress(ready, len(texts))
        while missing:
            before = len(missing)
            for number in list(missing):
                with self._alone(files[number]) as mine:
                    if not mine:
                        continue  # another process is at it
                    shard = self._read(files[number])
                    if shard is None:
                        shard = self._make(encoder, parts[number], files[number], keep=files)
                        encoded += len(parts[number])
                made[number] = shard
                missing.remove(number)
                ready += len(parts[number])
                if progress is not None:
                    progress(ready, len(texts))
            if len(missing) == before:
                time.sleep(WAIT)
        return States([made[number] for number in range(len(parts))], encoder.width, encoded)

    def kept(self) -> list[Kept]:
        """What is there, by encoder."""
        found = []
        for folder in sorted(self.folder.glob("*")):
            files = [file.stat() for file in folder.glob("*.safetensors")]
            try:
                told = json.loads((folder / "encoder.json").read_bytes())
                name, width = str(told["encoder"]), int(told["width"])
            except (OSError, ValueError, KeyError, TypeError):
                name, width = folder.name, 0
            if files:
                texts = sum(_texts(file) for file in folder.glob("*.safetensors"))
                size, used = sum(file.st_size for file in files), max(file.st_mtime for file in files)
                found.append(Kept(name, width, len(files), texts, size, used))
        return found

    def clear(self) -> int:
        """Delete everything; how many bytes that were."""
        return self._delete(self._files())

    # --- shards ----------------------------------------------------------------------------------------------

    def _make(self, encoder: Encoder, texts: Sequence[Text], file: Path, keep: Sequence[Path]) -> Shard:
        found = encoder.encode(texts)
        ends = np.cumsum([len(one) for one in found.states], dtype=np.int64)
        states = np.concatenate(found.states) if found.states else np.zeros((0, encoder.width), np.float16)
        try:
            self._write(encoder, file, states, ends, found.cut)
            self._make_room(keep)
        except OSError as error:
            warnings.warn(
                f"cannot keep token states in {self.folder} ({error.strerror}), so texts are encoded every time: "
                "set EXSSNET_CACHE to a writable folder",
                stacklevel=2,
            )
            return Shard(states, ends, found.cut)
        return self._read(file) or Shard(states, ends, found.cut)

    def _write(self, encoder: Encoder, file: Path, states: TokenStates, ends: NDArray[np.int64], cut: int) -> None:
        from safetensors.numpy import save

        file.parent.mkdir(parents=True, exist_ok=True)
        about = file.parent / "encoder.json"
        if not about.exists():
            write_atomic(about, json.dumps({"encoder": encoder.name, "width": encoder.width}).encode())
        facts = {"key": file.stem, "cut": str(cut), "texts": str(len(ends)), "sha256": _digest(ends, states)}
        write_atomic(file, save({"states": states, "ends": ends}, facts))

    def _read(self, file: Path) -> Shard | None:
        """A shard that is there and whole; None otherwise."""
        found = self._open.get(file)
        if found is None:
            try:
                found = _mapped(file)
            except (OSError, ValueError, KeyError, TypeError):
                return None
            self._open[file] = found
        with suppress(OSError):
            os.utime(file)  # it was used now
        return found

    @contextmanager
    def _alone(self, file: Path) -> Iterator[bool]:
        """Whether this process may make a shard: no other one is making it."""
        from filelock import FileLock, Timeout

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file.with_suffix(".lock"), timeout=0, thread_local=False)
            lock.acquire()
        except Timeout:
            yield False
            return
        except OSError:  # nothing can be written there: nobody else can either
            yield True
            return
        try:
            yield True
        finally:
            with suppress(OSError):
                file.with_suffix(".lock").unlink()
            lock.release()

    # --- size ------------------------------------------------------------------------------------------------

    def _make_room(self, keep: Sequence[Path]) -> None:
        """Delete what was not used for longest until the rest fits; what is being used now stays."""
        files = [(file.stat(), file) for file in self._files()]
        over = sum(status.st_size for status, _ in files) - self.most_bytes
        if over <= 0:
            return
        using = set(keep)
        for _, file in sorted(files, key=lambda one: one[0].st_mtime_ns):
            if over <= 0:
                return
            if file not in using:
                over -= self._delete([file])
        if over > 0 and keep and keep[0] not in self._told:
            self._told.add(keep[0])
            warnings.warn(
                f"the token states of one data set take more than the {self.most_bytes / GB:g} GB that the cache may "
                f"have: set {VARIABLE} to allow more",
                stacklevel=2,
            )

    def _files(self) -> list[Path]:
        for left in self.folder.glob("*/.*.tmp"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()
        return [*self.folder.glob("*/*.safetensors")]

    def _delete(self, files: Sequence[Path]) -> int:
        total = 0
        for file in files:
            self._open.pop(file, None)
            with suppress(OSError):  # another process was faster, or holds it open on Windows
                size = file.stat().st_size
                file.unlink()
                total += size
        return total


def state_cache() -> StateCache:
    """The cache of this user: below `EXSSNET_CACHE`, up to `EXSSNET_CACHE_GB`."""
    chosen = os.environ.get(VARIABLE)
    try:
        most = float(chosen or USUAL_GB)
    except ValueError:
        most = -1.0
    if not 0 <= most < 10**6:
        raise InputError(f"{VARIABLE} is '{chosen}': give a number of gigabytes, for example {USUAL_GB:g}")
    return _cache_at(cache_folder() / "states", int(most * GB))


@cache
def _cache_at(folder: Path, most_bytes: int) -> StateCache:
    return StateCache(folder, most_bytes)


def texts_digest(texts: Sequence[Text]) -> str:
    """SHA-256 over texts in their order."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def _key(encoder: Encoder, texts: Sequence[Text]) -> str:
    return hashlib.sha256(f"{encoder.digest} {texts_digest(texts)}".encode()).hexdigest()[:40]


def _digest(ends: NDArray[np.int64], states: TokenStates) -> str:
    total = hashlib.sha256(f"{states.shape} {states.dtype}\n".encode())
    total.update(np.ascontiguousarray(ends).data)
    total.update(np.ascontiguousarray(states).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _mapped(file: Path) -> Shard:
    """A shard whose bytes are those that were written; ValueError, KeyError or OSError otherwise."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length < 10**6:
            raise ValueError("no header")
        header = json.loads(stream.read(length))
    start, facts = 8 + length, header["__metadata__"]
    if facts["key"] != file.stem:
        raise ValueError("another shard")
    ends = _array(file, start, header["ends"], "<i8")
    states = _array(file, start, header["states"], "<f2")
    if _digest(ends, states) != facts["sha256"]:
        raise ValueError("damaged")
    return Shard(states, ends, int(facts["cut"]))


def _array(file: Path, start: int, told: dict[str, list[int]], kind: str) -> NDArray[Any]:
    shape, (begin, end) = tuple(told["shape"]), told["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError("shape")
    if begin == end:
        return np.zeros(shape, kind)
    # copy on write: never written to, but torch complains of arrays that cannot be
    return np.memmap(file, kind, "c", start + begin, shape)


def _texts(file: Path) -> int:
    """How many texts a shard has, without reading all of it."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            return int(json.loads(stream.read(min(length, 10**6)))["__metadata__"]["texts"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
