"""A run's folder: config, log and record; a checkpoint while it is unfinished, and a lock while it is written."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from exssnet.errors import InputError, ParseError, RunError
from exssnet.experiments import record
from exssnet.experiments.config import RunConfig
from exssnet.io import parse
from exssnet.io.disk import TEMPORARY, flag, write_whole
from exssnet.train import checkpoint

LOCK = "lock"
WAIT = 0.2  # seconds for another process, such as one that is just done
_FILES = (r"config\.yaml", r"results\.json", r"checkpoint\.safetensors")
_OURS = re.compile("|".join(TEMPORARY.format(name) for name in _FILES))


def kept(configs: Sequence[RunConfig], out: Path) -> str:
    """What is left of runs that were stopped, and how to go on."""
    folders = [RunFolder(out, config) for config in configs]
    unfinished = [folder for folder in folders if not folder.finished]
    resumed = [folder for folder in unfinished if folder.checkpoint.exists()]
    done = f"{len(folders) - len(unfinished)} of {len(folders)} runs are finished; " if len(folders) > 1 else ""
    if len(resumed) > 1:
        return f"{done}{len(resumed)} are kept up to their last checkpoints: the same command goes on from there"
    if resumed:
        (run,) = resumed
        age = f"{time.time() - run.checkpoint.stat().st_mtime:.0f} s ago"
        return f"{done}{run.path} is kept up to its checkpoint of {age}: the same command goes on from there"
    if unfinished:
        return f"{done}of {unfinished[0].path} nothing is kept yet: the same command starts it again"
    return f"{done or 'the run is finished; '}the same command prints it"


class RunFolder:
    """Reads and writes one run's files; every file but the log is replaced whole."""

    def __init__(self, out: Path, config: RunConfig) -> None:
        self.config, self.out = config, out
        self.path = out / config.folder
        self.checkpoint = self.path / "checkpoint.safetensors"
        self._config, self._results = self.path / "config.yaml", self.path / "results.json"
        self._log, self._lock = self.path / "log.jsonl", self.path / LOCK

    def check(self) -> None:
        """Refuse, before anything is written, a folder of another configuration or one that cannot be written."""
        for file in (self._config, self._results, self._log, self.checkpoint, self._lock):
            _require_own(file)
        if self._config.exists():
            there = RunConfig.read(self._config)
            differences = there.differences(self.config)
            if differences:
                raise RunError(
                    f"{self.path} holds a run with another configuration (different: {', '.join(differences)}): "
                    f"choose another --out, or delete the folder"
                )
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise RunError(f"cannot write to {place}: choose another --out folder")

    def results(self) -> dict[str, Any] | None:
        """The record, if the run is finished."""
        if not self.finished:
            return None
        return record.read(self._results)[1]

    @property
    def finished(self) -> bool:
        return self._results.exists()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder and hold it against other processes; a killed process lets go of it.

        A run that is refused before its first task is learned leaves nothing behind.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._own_writes():
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self._locked():
                self.check()  # once more: another process may have been here since
                with self._own_writes():
                    for left_by_a_kill in self.path.glob(".*.tmp"):
                        if _OURS.fullmatch(left_by_a_kill.name):
                            left_by_a_kill.unlink()
                    if not self._config.exists():
                        write_whole(self._config, self.config.to_yaml().encode())
                try:
                    yield
                except InputError:
                    if not self._has_learned():
                        for file in (self._config, self._log, self.checkpoint):
                            file.unlink(missing_ok=True)
                    raise
        except InputError:
            with suppress(OSError):  # another process may be there by now
                for folder in made:
                    folder.rmdir()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Its file is removed while it is held: who waits for a removed one takes a new one."""
        from filelock import FileLock, Timeout

        _require_own(self._lock)
        lock = FileLock(self._lock, timeout=WAIT, poll_interval=WAIT / 10, thread_local=False)
        with self._own_writes():
            try:
                lock.acquire()
            except Timeout:
                raise RunError(f"{self.path} is being written by another process: wait for it to end") from None
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes it when it is let go
                self._lock.unlink()
            with suppress(OSError):  # the run is written
                lock.release()

    @contextmanager
    def _own_writes(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path} ({error.strerror}): make room there or choose another --out folder"
            ) from error

    def _has_learned(self) -> bool:
        if not self._log.exists():
            return False
        try:
            return b'"event": "task"' in parse.read(self._log, 16 * parse.MEBIBYTE)
        except ParseError:  # it is long
            return True

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put a checkpoint in place of the one before."""
        with self._own_writes():
            checkpoint.write(self.checkpoint, tensors, facts)

    def finish(self, found: dict[str, Any]) -> None:
        with self._own_writes():
            write_whole(self._results, (json.dumps(found, indent=1) + "\n").encode())
            self.checkpoint.unlink(missing_ok=True)

    def cut_log(self, size: int) -> None:
        """Take the log back to what a checkpoint knew of it."""
        with self._own_writes(), self._open_log() as log:
            log.truncate(min(size, self.log_size()))

    def log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def log(self, **event: Any) -> None:
        with self._own_writes(), self._open_log() as log:
            log.write(json.dumps(event).encode() + b"\n")

    def _open_log(self) -> BinaryIO:
        """The log, to append to. What is no file of this folder is never written to."""
        _require_own(self._log)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        flags |= flag("O_NOFOLLOW") | flag("O_CLOEXEC") | flag("O_BINARY")
        return os.fdopen(os.open(self._log, flags, 0o666), "ab")


def _require_own(file: Path) -> None:
    """Refuse what would be read from elsewhere, written elsewhere, or waited for without end."""
    try:
        mode = os.lstat(file).st_mode
    except OSError:  # not there, or in no folder that can be looked into: opening it will tell
        return
    if not stat.S_ISREG(mode):
        kind = "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "FIFO or a device"
        raise RunError(f"{file} is a {kind}: a run has only regular files in its folder, delete it")
