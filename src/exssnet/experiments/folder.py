"""A run's folder: `config.yaml`, `log.jsonl`, `results.json`, and a checkpoint while it is unfinished."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from exssnet.disk import write_whole
from exssnet.errors import InputError, RunError
from exssnet.experiments.config import RunConfig
from exssnet.train import checkpoint


class RunFolder:
    """Reads and writes one run's files; every file but the log is replaced whole."""

    def __init__(self, out: Path, config: RunConfig) -> None:
        self.config, self.out = config, out
        self.path = out / config.folder
        self.checkpoint = self.path / "checkpoint.safetensors"
        self._config, self._results = self.path / "config.yaml", self.path / "results.json"
        self._log = self.path / "log.jsonl"

    def check(self) -> None:
        """Refuse, before anything is written, a folder of another configuration or one that cannot be written."""
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
        if not self._results.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(self._results.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self._results} is no readable record ({error}): delete it to make the run again"
            ) from error
        return record

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder and hold it against other processes; a killed process lets go of it.

        A run that is refused before its first task is learned leaves nothing behind.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._own_writes():
            self.path.mkdir(parents=True, exist_ok=True)
            held = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path} is being written by another process: wait for it to end") from None
            self.check()  # once more: another process may have been here since
            with self._own_writes():
                for left_by_a_kill in self.path.glob(".*.tmp"):
                    left_by_a_kill.unlink()
                if not self._config.exists():
                    write_whole(self._config, self.config.to_yaml().encode())
            yield
        except InputError:
            if not self._has_learned():
                self._remove(made)
            raise
        finally:
            os.close(held)

    @contextmanager
    def _own_writes(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path} ({error.strerror}): make room there or choose another --out folder"
            ) from error

    def _has_learned(self) -> bool:
        return self._log.exists() and '"event": "task"' in self._log.read_text("utf-8")

    def _remove(self, made: list[Path]) -> None:
        for file in (self._config, self._log, self.checkpoint):
            file.unlink(missing_ok=True)
        for folder in made:
            if not any(folder.iterdir()):
                folder.rmdir()

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put a checkpoint in place of the one before."""
        with self._own_writes():
            checkpoint.write(self.checkpoint, tensors, facts)

    def finish(self, record: dict[str, Any]) -> None:
        with self._own_writes():
            write_whole(self._results, (json.dumps(record, indent=1) + "\n").encode())
            self.checkpoint.unlink(missing_ok=True)

    def cut_log(self, size: int) -> None:
        """Take the log back to what a checkpoint knew of it."""
        with self._own_writes(), self._log.open("ab") as log:
            log.truncate(min(size, self.log_size()))

    def log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def log(self, **event: Any) -> None:
        with self._own_writes(), self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(event) + "\n")
