"""The folder of a run: config, log and record; a checkpoint until it is finished, a lock while it is written."""

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
from exssnet.io.disk import TEMPORARY, flag, write_atomic
from exssnet.train import checkpoint

LOCK = "lock"
WAIT = 0.2  # seconds to wait for another process
_FILES = (r"config\.yaml", r"results\.json", r"checkpoint\.safetensors")
_OURS = re.compile("|".join(TEMPORARY.format(name) for name in _FILES))


def describe_stopped(configs: Sequence[RunConfig], out: Path) -> str:
    """Say what was saved of stopped runs, and how to continue."""
    folders = [RunFolder(out, config) for config in configs]
    unfinished = [folder for folder in folders if not folder.finished]
    resumed = [folder for folder in unfinished if folder.checkpoint.exists()]
    done = f"{len(folders) - len(unfinished)} of {len(folders)} runs are finished; " if len(folders) > 1 else ""
    if len(resumed) > 1:
        return f"{done}{len(resumed)} have checkpoints: run the same command to continue"
    if resumed:
        (run,) = resumed
        age = f"{time.time() - run.checkpoint.stat().st_mtime:.0f} s ago"
        return f"{done}{run.path} has a checkpoint of {age}: run the same command to continue"
    if unfinished:
        return f"{done}{unfinished[0].path} has no checkpoint: run the same command to start again"
    return f"{done or 'the run is finished; '}run the same command to print it"


class RunFolder:
    """Reads and writes the files of a run; every file except the log is replaced atomically."""

    def __init__(self, out: Path, config: RunConfig) -> None:
        self.config, self.out = config, out
        self.path = out / config.folder
        self.checkpoint = self.path / "checkpoint.safetensors"
        self._config, self._results = self.path / "config.yaml", self.path / "results.json"
        self._log, self._lock = self.path / "log.jsonl", self.path / LOCK

    def check(self) -> None:
        """Refuse a folder with another configuration, or one that cannot be written, before writing."""
        for file in (self._config, self._results, self._log, self.checkpoint, self._lock):
            _require_own(file)
        if self._config.exists():
            differences = RunConfig.read(self._config).differences(self.config)
            if differences:
                raise RunError(
                    f"{self.path} has a run with another configuration (different: {', '.join(differences)}): "
                    f"choose another --out, or delete the folder"
                )
        folder = self.path
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise RunError(f"cannot write to {folder}: choose another --out folder")

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
        """Create the folder and lock it; the lock of a killed process is released.

        A run that is refused before its first task is learned leaves no files.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._own_writes():
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self._locked():
                self.check()  # again: another process may have changed it
                with self._own_writes():
                    for left_by_a_kill in self.path.glob(".*.tmp"):
                        if _OURS.fullmatch(left_by_a_kill.name):
                            left_by_a_kill.unlink()
                    if not self._config.exists():
                        write_atomic(self._config, self.config.to_yaml().encode())
                try:
                    yield
                except InputError:
                    if not self._has_learned():
                        for file in (self._config, self._log, self.checkpoint):
                            file.unlink(missing_ok=True)
                    raise
        except InputError:
            with suppress(OSError):  # another process may use it
                for folder in made:
                    folder.rmdir()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Its file is removed while it is held: a process waiting for it opens a new one."""
        from filelock import FileLock, Timeout

        _require_own(self._lock)
        lock = FileLock(self._lock, timeout=WAIT, poll_interval=WAIT / 10, thread_local=False)
        with self._own_writes():
            try:
                lock.acquire()
            except Timeout:
                raise RunError(f"{self.path} is in use by another process: wait until it ends") from None
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes it on release
                self._lock.unlink()
            with suppress(OSError):  # the run is complete
                lock.release()

    @contextmanager
    def _own_writes(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path} ({error.strerror}): free disk space or choose another --out folder"
            ) from error

    def _has_learned(self) -> bool:
        if not self._log.exists():
            return False
        try:
            return b'"event": "task"' in parse.read(self._log, 16 * parse.MEBIBYTE)
        except ParseError:  # it is long
            return True

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        with self._own_writes():
            checkpoint.write(self.checkpoint, tensors, facts)

    def finish(self, found: dict[str, Any]) -> None:
        with self._own_writes():
            write_atomic(self._results, (json.dumps(found, indent=1) + "\n").encode())
            self.checkpoint.unlink(missing_ok=True)

    def cut_log(self, size: int) -> None:
        """Truncate the log to its size at a checkpoint."""
        with self._own_writes(), self._open_log() as log:
            log.truncate(min(size, self.log_size()))

    def log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def log(self, **event: Any) -> None:
        with self._own_writes(), self._open_log() as log:
            log.write(json.dumps(event).encode() + b"\n")

    def _open_log(self) -> BinaryIO:
        """Open the log to append to it; only a regular file of this folder."""
        _require_own(self._log)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        flags |= flag("O_NOFOLLOW") | flag("O_CLOEXEC") | flag("O_BINARY")
        return os.fdopen(os.open(self._log, flags, 0o666), "ab")


def _require_own(file: Path) -> None:
    """Refuse links, folders and FIFOs."""
    try:
        mode = os.lstat(file).st_mode
    except OSError:  # missing or not accessible: opening it raises
        return
    if not stat.S_ISREG(mode):
        kind = "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "FIFO or a device"
        raise RunError(f"{file} is a {kind}: delete it, a run folder has regular files only")
