"""One run: a method learns a benchmark's stream, and leaves a record that says everything."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exssnet import randomness
from exssnet.core.module.skeleton import prepare_compiler
from exssnet.data.tasks import Data, Outline, Stream, Task
from exssnet.engine.execution import CPU, CUDA, Execution
from exssnet.engine.kernels import has_triton
from exssnet.errors import InputError, RunError
from exssnet.experiments import metrics, recipes
from exssnet.experiments.class_incremental import class_incremental
from exssnet.experiments.config import RunConfig
from exssnet.experiments.run_folder import RunFolder
from exssnet.methods import Method, parse
from exssnet.models import build, fitting
from exssnet.train import EpochReport, Listener, Trainer, TrainSettings, accuracy, checkpoint
from exssnet.train.listener import Forwarding
from exssnet.version import __version__

CHECKPOINT_SECONDS = 30.0


def run(
    config: RunConfig, out: Path, listener: Listener | None = None, checkpoint_seconds: float = CHECKPOINT_SECONDS
) -> dict[str, Any]:
    """Make the run, or the rest of it; a finished one is only read. Its record."""
    folder = RunFolder(out, config)
    folder.check()
    record = folder.results()
    if record is not None:
        return record
    with computing(config):
        try:
            stream, method = prepare(config)
            with folder.writing():
                record = folder.results()  # another process may have finished it while we prepared
                if record is None:
                    record = _Run(config, folder, stream, method, listener or Listener(), checkpoint_seconds).finish()
                return record
        except torch.OutOfMemoryError as error:
            raise RunError("the GPU's memory is full: lower --together or --batch-size, or free the GPU") from error
        except RuntimeError as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise RunError(f"the network cannot be compiled ({reason}): give --compile off") from error


def prepare(config: RunConfig) -> tuple[Stream, Method]:
    """Stream and method of a configuration, on its device; everything that can be refused is refused here."""
    kind, _ = parse(config.method)
    settings = kind.settings_type(**config.settings)
    train_settings(config)
    if config.compile == "on":
        prepare_compiler()
    stream = recipes.stream(config)
    classes = tuple(len(group) for group in stream.class_order)
    examples = sum(len(task.train) for task in stream) if hasattr(settings, "buffer") else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.derive(config.seed, "module"))
        outputs = kind.outputs(config.head, classes)
        network = fitting(stream.input_shape) if config.network == "auto" else config.network
        module = build(network, stream.input_shape, outputs, config.width)
    method = kind(module, settings, config.seed, config.head, Outline(classes, examples))
    method.to(config.device)
    structure = f"{network} {stream.input_shape} {outputs} {config.width} {config.head}"
    method.execute(replace(_execution(config), structure=structure))
    return stream, method


def _execution(config: RunConfig) -> Execution:
    """The fast way to compute on the device."""
    if config.device == "cpu":
        return CPU
    return replace(
        CUDA,
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        narrow=CUDA.narrow if has_triton() else 0,
        compiled_batch=config.batch_size if config.compile == "on" else 0,
    )


def train_settings(config: RunConfig) -> TrainSettings:
    """How a run trains, as its configuration says."""
    if config.select == "best" and not config.validation:
        raise InputError("select 'best' needs a validation part: give a share of the training data, --validation 0.1")
    return TrainSettings(config.batch_size, config.optimizer, config.select, config.weight_decay, config.schedule)


class _Run:
    """A run in progress: what it has so far, and how it is saved and taken up again."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, stream: Stream, method: Method, listener: Listener,
        checkpoint_seconds: float,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.stream, self.method = config, folder, stream, method
        self.listener = listener
        self.rows: list[list[float]] = []  # per learned task: the accuracies measured then, up to its own
        self.seconds: list[dict[str, float]] = []  # per task: setup, phases, evaluation
        self.identified: dict[int, float] = {}  # per task: test examples whose task was found, in %, at the last look
        self._tests: dict[int, Data] = {}  # not on the device, where they would take more room than the masks
        self._checkpoint_seconds = checkpoint_seconds
        self._before, self._started, self._saved = 0.0, time.perf_counter(), time.perf_counter()
        self.trainer = Trainer(
            method, config.seed, train_settings(config), _Logged(folder, listener), self._save_if_due
        )

    def finish(self) -> dict[str, Any]:
        snapshot = self._resume()
        for index in range(len(self.rows), len(self.stream)):
            if self.method.joint and index + 1 < len(self.stream):
                self.rows.append([])  # nothing is learned, or measured, before the last task is there
                self.seconds.append({})
                continue
            task = self._task(index)
            self.seconds.append(self.trainer.learn(task, snapshot))
            snapshot = None
            self._evaluate(task)
            if index + 1 < len(self.stream):
                self._save_if_due(between_tasks=True)
        record = self._record()
        self.folder.finish(record)
        return record

    def _task(self, index: int) -> Task:
        """What is learned at this place of the stream."""
        if self.method.joint:
            return self.method.together([_on(task, self.config.device) for task in self.stream])
        return _on(self.stream[index], self.config.device)

    def _evaluate(self, learned: Task) -> None:
        """The test split is read here and nowhere else."""
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
        """How many accuracies of the row after this task are those of the row before, and are not measured again.

        An earlier task that has not changed has the accuracy that was measured before: a method that promises this
        has just checked, when it added the task, that nothing moved which earlier ones use. At the end all are
        measured.
        """
        last = index + 1 == len(self.stream)
        if self.config.setting != "task-incremental":  # later tasks draw answers away
            return 0
        return index if self.method.exclusive and self.config.evaluate == "all" and not last else 0

    def _accuracy(self, index: int) -> float:
        test = self._tests[index] if index in self._tests else self.stream[index].test
        if self.config.evaluate == "all":
            self._tests[index] = test  # it will be asked for after every task
        test = test.to(self.config.device)
        if self.config.setting == "class-incremental":
            found = class_incremental(self.method, self.stream, index, test, self.config.routing)
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
        """Take up the checkpoint, if there is one; where it was inside a task."""
        if not self.folder.checkpoint.exists():
            self.folder.cut_log(0)
            return None
        tensors, progress = checkpoint.read(self.folder.checkpoint)
        if progress.get("made_with") != self._made_with():
            raise RunError(
                f"{self.folder.path} was begun with other data, versions of torch or exssnet, or another GPU: "
                f"delete the folder to start the run again"
            )
        self.method.load_state(checkpoint.part(tensors, "method."), progress["method"])
        self.rows, self.seconds = progress["rows"], progress["seconds"]
        self._before = progress["elapsed"]
        self.folder.cut_log(progress["log"])
        if progress["position"] is None:
            return None
        return checkpoint.part(tensors, "trainer."), progress["position"]

    def _made_with(self) -> dict[str, Any]:
        """What must be the same for the rest of a run to fit its beginning."""
        gpu = device_name(self.config.device) if self.config.device != "cpu" else None
        return {"data": self.stream.data_digests, "versions": versions(), "gpu": gpu}

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._started

    # --- the record ------------------------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        config, stream = self.config, self.stream
        matrix = [
            [None] * (index + 1 - len(row)) + row + [None] * (len(stream) - index - 1)
            for index, row in enumerate(self.rows)
        ]
        measured = [
            [None if entry is None else place >= self._carried_over(index) for place, entry in enumerate(row)]
            for index, row in enumerate(matrix)
        ]
        proof, routed = self.method.verify(), config.setting == "class-incremental"
        # between two measurements a task that is proved unchanged has the accuracy it had; of others nothing is known,
        # nor of answers among the classes of all tasks
        in_turn = all(matrix[i][i] is not None for i in range(len(stream)))  # not where all are learned at once
        complete = in_turn and (config.evaluate == "all" or (routed is False and proof is not None and proof.verified))
        facts = self.method.facts()
        overlaps = facts.get("sparse_overlap")
        return {
            "benchmark": config.benchmark,
            "method": config.method,
            "seed": config.seed,
            "miniature": config.samples_per_class is not None,
            "sample": stream.sample,  # of a data set that is here only in part
            "setting": config.setting,
            "task_identification": [self.identified[i] for i in range(len(stream))] if self.identified else None,
            "texts": stream.text_counts() or None,
            "tasks": len(stream),
            "epochs": self.method.planned_epochs(self.method.settings),  # per task, all phases together
            "class_order": stream.class_order,
            "accuracy_matrix": matrix,
            "accuracy_measured": measured,
            "average_accuracy": metrics.average_accuracy(matrix),
            "forgetting": metrics.forgetting(matrix) if complete else None,
            "forgetting_by_definition": {
                name: of(matrix) if complete or (in_turn and name == "avalanche") else None
                for name, of in metrics.FORGETTING.items()
            },
            "sparse_overlap": overlaps,
            "average_sparse_overlap": None if overlaps is None else metrics.average_overlap(overlaps),
            "zero_forgetting": None if proof is None else {
                "verified": proof.verified,
                "digests": proof.digests,
                "changed": [f"{task}: {tensor}" for task, tensor in proof.changed],
            },
            "transfer": facts.get("transfer"),
            "storage": facts.get("storage"),
            "seconds": {"total": self._elapsed(), "tasks": self.seconds},
            "device": device_name(config.device),
            "versions": versions(),
            "data_digests": stream.data_digests,
            "config": asdict(config),
        }  # fmt: skip


class _Logged(Forwarding):
    """Writes every epoch to the run's log on the way."""

    def __init__(self, folder: RunFolder, listener: Listener) -> None:
        super().__init__(listener)
        self._folder = folder

    def epoch_ended(self, report: EpochReport) -> None:
        self._folder.log(event="epoch", **asdict(report))
        super().epoch_ended(report)


@contextmanager
def computing(config: RunConfig) -> Iterator[None]:
    """The run's device and threads, and only algorithms that give the same bits every time; all put back afterwards."""
    if config.device != "cpu":
        always_the_same = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        )
        products = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # fp32 means it: no TF32 in products either
        try:
            with torch.cuda.device(config.device), always_the_same:
                yield
        finally:
            torch.set_float32_matmul_precision(products)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _on(task: Task, device: str) -> Task:
    held = None if task.validation is None else task.validation.to(device)
    return replace(task, train=task.train.to(device), validation=held)


def device_name(device: str) -> str:
    """A device as a record names it."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def versions() -> dict[str, str]:
    """What a result may depend on."""
    import numpy

    return {
        "exssnet": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
