"""The one training loop: every method, every phase.

All randomness of an epoch is keyed by (seed, task, phase, epoch), so the loop can stop after any epoch and a later
process can go on from a snapshot as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet import randomness
from exssnet.core.engine import Engine
from exssnet.data.tasks import Task
from exssnet.errors import InputError
from exssnet.methods.base import Method, Phase
from exssnet.train.checkpoint import part
from exssnet.train.evaluate import accuracy
from exssnet.train.listener import EpochReport, Listener
from exssnet.train.optimizers import OptimizerFactory, optimizer_factory, schedule_of
from exssnet.train.steps import Steps

SELECTS = ("last", "best")
Snapshot = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and JSON


@dataclass(frozen=True)
class TrainSettings:
    """How the loop runs, whatever the method. `select`: keep the last epoch, or the best on validation data."""

    batch_size: int = 64
    optimizer: str | OptimizerFactory = "adam"
    select: str = "last"
    weight_decay: float | None = None  # None: what the optimizer usually has
    schedule: str = "cosine"  # of the rate, over each phase

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}: it must be a whole number, at least 1")
        if self.select not in SELECTS:
            raise InputError(f"select is '{self.select}': choose one of {', '.join(SELECTS)}")
        self.factory()
        schedule_of(self.schedule)

    def factory(self, engine: Engine | None = None) -> OptimizerFactory:
        """What makes a phase's optimizer."""
        return optimizer_factory(self.optimizer, self.weight_decay, engine)


@dataclass
class _Position:
    """Where the loop is inside a task: what a snapshot must hold besides the method's own state."""

    phases: list[Phase] = field(default_factory=list)
    epoch: int = 0  # finished epochs of the last phase
    optimizer: Optimizer | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # per phase
    best: float = -1.0  # validation accuracy
    best_tensors: dict[str, Tensor] = field(default_factory=dict)


class Trainer:
    """Learns tasks with a method. `after_epoch` is called when a snapshot may be taken."""

    def __init__(
        self, method: Method, seed: int, settings: TrainSettings | None = None,
        listener: Listener | None = None, after_epoch: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.method, self.seed = method, seed
        self.settings = settings or TrainSettings()
        self.listener = listener or Listener()
        self.after_epoch = after_epoch or (lambda: None)
        self._at = _Position()

    def learn(self, task: Task, snapshot: Snapshot | None = None) -> dict[str, float]:
        """Learn one task, from its beginning or from a snapshot of it; seconds per phase."""
        if self.settings.select == "best" and task.validation is None:
            raise InputError("select 'best' needs a validation part: cut one from the training data")
        task.train.use(self.method.engine)
        self._at = _Position(seconds=dict(snapshot[1]["seconds"]) if snapshot is not None else {})
        self.listener.task_started(task.index, task.name)
        devices = [task.train.device] if task.train.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # the caller's own random state stays as it is
            started = time.perf_counter()
            for number, phase in enumerate(self.method.phases(task)):
                if number == 0:  # what a method does before its first phase: KKT, above all
                    self._at.seconds.setdefault("setup", time.perf_counter() - started)
                self._at.phases.append(phase)
                done = 0
                if snapshot is not None:
                    done = self._restore(snapshot, number, phase)
                self._train(task, phase, done)
        self.method.end_task(task)
        return self._at.seconds

    def _train(self, task: Task, phase: Phase, done: int) -> None:
        if done == phase.epochs:
            self.listener.phase_started(phase.name, phase.epochs, done)
            return
        at = self._at
        if not done:
            at.epoch, at.best, at.best_tensors = 0, -1.0, {}
            at.optimizer = self.settings.factory(self.method.engine)(phase.parameters, phase.lr)
        assert at.optimizer is not None
        named = isinstance(self.settings.optimizer, str)
        steps = Steps(self.method, task.train, phase, at.optimizer, self.settings.batch_size, named)
        self.listener.phase_started(phase.name, phase.epochs, done)
        schedule = schedule_of(self.settings.schedule)
        for epoch in range(done, phase.epochs):
            started = time.perf_counter()
            lr = schedule(phase.lr, epoch, phase.epochs)
            loss, correct = self._epoch(steps, task, phase, epoch, lr)
            validation = None
            if task.validation is not None:
                validation = accuracy(lambda x: self.method.forward(x, training=False), task.validation)
                self._remember_best(phase, validation)
            at.epoch = epoch + 1
            seconds = time.perf_counter() - started
            at.seconds[phase.name] = at.seconds.get(phase.name, 0.0) + seconds
            self.listener.epoch_ended(
                EpochReport(task.name, phase.name, epoch + 1, phase.epochs, loss, correct, validation, lr, seconds)
            )
            if at.epoch == phase.epochs and at.best_tensors:
                _copy(at.best_tensors, self._moving(phase))
            self.after_epoch()
        self._check_last_step(task, phase)

    def _check_last_step(self, task: Task, phase: Phase) -> None:
        """No loss follows the last step: look at what it left."""
        few = torch.arange(min(len(task.train), self.settings.batch_size), device=task.train.device)
        with torch.no_grad():
            logits = self.method.forward(task.train.batch(few)[0], training=False)
        if not bool(logits.isfinite().all()):
            raise _diverged(task, phase, phase.epochs, "an output became infinite", phase.lr)

    def _epoch(self, steps: Steps, task: Task, phase: Phase, epoch: int, lr: float) -> tuple[float, float]:
        """Train one epoch; mean loss and accuracy."""
        key = (task.name, phase.name, epoch)
        order = task.train.order(self.settings.batch_size, randomness.generator(self.seed, "order", *key))
        torch.manual_seed(randomness.derive(self.seed, "module", *key))  # what the module draws itself: dropout
        augmentation = randomness.derive(self.seed, "augmentation", *key)
        mean, correct = steps.epoch(order.to(task.train.device), lr, augmentation, self.listener.progress)
        finite = all(bool(parameter.isfinite().all()) for parameter in phase.parameters)
        if not math.isfinite(mean):
            raise _diverged(task, phase, epoch + 1, f"the loss became {mean}", lr)
        if not finite:
            raise _diverged(task, phase, epoch + 1, "a parameter became infinite", lr)
        return mean, correct

    def _moving(self, phase: Phase) -> dict[str, Tensor]:
        """All tensors that training changes in this phase, by name."""
        parameters = {f"parameter.{i}": p for i, p in enumerate(phase.parameters)}
        return parameters | {f"buffer.{name}": b for name, b in self.method.moving().items()}

    def _remember_best(self, phase: Phase, validation: float) -> None:
        if self.settings.select == "best" and validation > self._at.best:
            self._at.best = validation
            self._at.best_tensors = {n: t.detach().clone() for n, t in self._moving(phase).items()}

    # --- snapshots -----------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The position inside the current task, to be restored by `learn` in another process."""
        at = self._at
        tensors: dict[str, Tensor] = {}
        for number, phase in enumerate(at.phases[:-1]):  # copies: a task's private tensors are in every phase
            tensors |= {f"phase.{number}.{i}": p.clone() for i, p in enumerate(phase.parameters)}
        if at.phases:
            tensors |= {f"now.{name}": t for name, t in self._moving(at.phases[-1]).items()}
            tensors |= {f"best.{name}": t for name, t in at.best_tensors.items()}
            assert at.optimizer is not None
            for i, state in at.optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{i}.{key}": torch.as_tensor(value) for key, value in state.items()}
        facts = {"phase": len(at.phases) - 1, "epoch": at.epoch, "seconds": dict(at.seconds), "best": at.best}
        return {name: tensor.detach() for name, tensor in tensors.items()}, facts

    def _restore(self, snapshot: Snapshot, number: int, phase: Phase) -> int:
        """Bring a phase to where the snapshot has it; how many of its epochs are done."""
        tensors, facts = snapshot
        at = self._at
        if number > facts["phase"]:
            return 0
        if number < facts["phase"]:
            _copy(part(tensors, f"phase.{number}."), {str(i): p for i, p in enumerate(phase.parameters)})
            return phase.epochs
        _copy(part(tensors, "now."), self._moving(phase))
        at.epoch, at.best, at.best_tensors = facts["epoch"], facts["best"], part(tensors, "best.")
        at.optimizer = self.settings.factory(self.method.engine)(phase.parameters, phase.lr)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in part(tensors, "optimizer.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        at.optimizer.load_state_dict({**at.optimizer.state_dict(), "state": state})
        return at.epoch


def _diverged(task: Task, phase: Phase, epoch: int, what: str, lr: float) -> InputError:
    return InputError(
        f"{what} in task '{task.name}', phase {phase.name}, epoch {epoch}: "
        f"lower the learning rate (it was {lr:g}) or the decay, or check the inputs"
    )


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
