"""One run: a method learns a benchmark's stream and writes a record."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exssnet.core.engine import Engine
from exssnet.data.tasks import Data, Stream, Task
from exssnet.errors import RunError
from exssnet.experiments.class_incremental import class_incremental
from exssnet.experiments.config import RunConfig
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.prepare import computing, prepare, train_settings
from exssnet.experiments.recording import FinishedRun, record_of
from exssnet.experiments.run_folder import RunFolder
from exssnet.methods import Method
from exssnet.methods.base import JointMethod
from exssnet.train import EpochReport, Listener, Trainer, accuracy, checkpoint
from exssnet.train.listener import Forwarding

CHECKPOINT_SECONDS = 30.0


def run(
    config: RunConfig, out: Path, listener: Listener | None = None, checkpoint_seconds: float = CHECKPOINT_SECONDS,
    engine: Engine | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run or resume, and return the record; a finished run is only read."""
    folder = RunFolder(out, config)
    folder.check()
    record = folder.results()
    if record is not None:
        return record
    with computing(config):
        try:
            stream, method = prepare(config, engine)
            with folder.writing():
                record = folder.results()  # another process may have finished it meanwhile
                if record is None:
                    record = _Run(config, folder, stream, method, listener or Listener(), checkpoint_seconds).finish()
                return record
        except torch.OutOfMemoryError as error:
            raise RunError("not enough GPU memory: lower --together or --batch-size, or free the GPU") from error


class _Run:
    """A run in progress: its results so far, saving and resuming."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, stream: Stream, method: Method, listener: Listener,
        checkpoint_seconds: float,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.stream, self.method = config, folder, stream, method
        self.listener = listener
        self.rows: list[list[float]] = []  # per learned task: accuracies on the tasks up to it
        self.seconds: list[dict[str, float]] = []  # per task: setup, phases, evaluation
        self.identified: dict[int, float] = {}  # per task: test examples whose task was found, in %, at the last look
        self._tests: dict[int, Data] = {}  # on the host: on the device they would take more memory than the masks
        self._checkpoint_seconds = checkpoint_seconds
        self._before, self._started, self._saved = 0.0, time.perf_counter(), time.perf_counter()
        self.trainer = Trainer(
            method, config.seed, train_settings(config), _Logged(folder, listener), self._save_if_due
        )

    def finish(self) -> dict[str, Any]:
        snapshot = self._resume()
        for index in range(len(self.rows), len(self.stream)):
            if isinstance(self.method, JointMethod) and index + 1 < len(self.stream):
                self.rows.append([])  # nothing is learned or measured before the last task
                self.seconds.append({})
                continue
            task = self._task(index)
            self.seconds.append(self.trainer.learn(task, snapshot))
            snapshot = None
            self._evaluate(task)
            if index + 1 < len(self.stream):
                self._save_if_due(between_tasks=True)
        carried_over = [self._carried_over(index) for index in range(len(self.rows))]
        finished = FinishedRun(
            self.config, self.stream, self.method, self.rows, carried_over, self.identified, self.seconds,
            self._elapsed(),
        )  # fmt: skip
        record = record_of(finished)
        self.folder.finish(record)
        return record

    def _task(self, index: int) -> Task:
        """The task at this index; for joint training all tasks together."""
        if isinstance(self.method, JointMethod):
            return self.method.together([self._on_device(task) for task in self.stream])
        return self._on_device(self.stream[index])

    def _on_device(self, task: Task) -> Task:
        device = self.config.device
        return replace(
            task,
            train=task.train.to(device),
            validation=None if task.validation is None else task.validation.to(device),
        )

    def _evaluate(self, learned: Task) -> None:
        """Measure accuracies; the test split is read only here."""
        started = time.perf_counter()
        last = learned.index + 1 == len(self.stream)
        first = 0 if self.config.evaluate == "all" or last else learned.index
        carried = self._carried_over(learned.index)
        row = self.rows[-1][:carried] if carried else []
        row += [self._accuracy(index) for index in range(first + carried, learned.index + 1)]
        self.seconds[-1]["evaluation"] = time.perf_counter() - started
        self.rows.append(row)
        self.folder.log(event="task", task=learned.name, accuracies=row, carried_over=carried)
        self.listener.task_ended(learned.name, row)

    def _carried_over(self, index: int) -> int:
        """Number of accuracies in this row that are copied from the row before instead of measured.

        An unchanged task has the accuracy that was measured before, and a method that guarantees zero forgetting
        has just checked that nothing changed which earlier tasks use. At the end all are
        measured.
        """
        last = index + 1 == len(self.stream)
        if self.config.setting != "task-incremental":  # later tasks draw answers away
            return 0
        return index if self.method.exclusive and self.config.evaluate == "all" and not last else 0

    def _accuracy(self, index: int) -> float:
        test = self._tests[index] if index in self._tests else self.stream[index].test
        if self.config.evaluate == "all":
            self._tests[index] = test  # used after every task
        test = test.to(self.config.device).use(self.method.engine)
        if self.config.setting == "class-incremental":
            found = class_incremental(self.method, self.stream, index, test, self.config.routing)
            if found.identified is not None:
                self.identified[index] = found.identified
            return found.accuracy
        return accuracy(partial(self.method.logits, task=self.stream.task_name(index)), test)

    # --- stopping and going on -------------------------------------------------------------------------------

    def _save_if_due(self, between_tasks: bool = False) -> None:
        if time.perf_counter() - self._saved < self._checkpoint_seconds:
            return
        self._saved = time.perf_counter()
        tensors, facts = self.method.state()
        everything = {f"method.{name}": tensor for name, tensor in tensors.items()}
        position: dict[str, Any] | None = None
        if not between_tasks:
            inside, position = self.trainer.snapshot()
            everything |= {f"trainer.{name}": tensor for name, tensor in inside.items()}
        progress = {
            "method": facts,
            "position": position,
            "rows": self.rows,
            "seconds": self.seconds,
            "elapsed": self._elapsed(),
            "log": self.folder.log_size(),
            "made_with": self._made_with(),
        }
        self.folder.save(everything, progress)

    def _resume(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Load the checkpoint, if there is one; return the position inside a task."""
        if not self.folder.checkpoint.exists():
            self.folder.cut_log(0)
            return None
        tensors, progress = checkpoint.read(self.folder.checkpoint)
        if progress.get("made_with") != self._made_with():
            raise RunError(
                f"{self.folder.path} was started with other data, other versions of torch or exssnet, or another GPU: "
                f"delete the folder to start again"
            )
        self.method.load_state(checkpoint.part(tensors, "method."), progress["method"])
        self.rows, self.seconds = progress["rows"], progress["seconds"]
        self._before = progress["elapsed"]
        self.folder.cut_log(progress["log"])
        if progress["position"] is None:
            return None
        return checkpoint.part(tensors, "trainer."), progress["position"]

    def _made_with(self) -> dict[str, Any]:
        """Data, versions and GPU, which must be equal to resume a run."""
        gpu = device_name(self.config.device) if self.config.device != "cpu" else None
        return {"data": self.stream.data_digests, "versions": versions(), "gpu": gpu}

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._started


class _Logged(Forwarding):
    """Writes every epoch to the run's log."""

    def __init__(self, folder: RunFolder, listener: Listener) -> None:
        super().__init__(listener)
        self._folder = folder

    def epoch_ended(self, report: EpochReport) -> None:
        self._folder.log(event="epoch", **asdict(report))
        super().epoch_ended(report)
