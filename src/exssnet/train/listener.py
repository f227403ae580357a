"""What a training loop tells whoever listens; a listener that does nothing is the default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpochReport:
    """One finished epoch. Accuracies in percent; `accuracy` is over the training batches as they were seen."""

    task: str
    phase: str
    epoch: int  # from 1
    epochs: int
    loss: float
    accuracy: float
    validation: float | None
    lr: float
    seconds: float


class Listener:
    """Override what you want to hear."""

    def task_started(self, index: int, name: str) -> None: ...

    def epochs_planned(self, epochs: int) -> None:
        """All phases of the task together have this many epochs; told by `Model.learn`."""

    def phase_started(self, name: str, epochs: int, done: int) -> None:
        """A phase begins, `done` of its epochs already behind it (more than none after a resume)."""

    def progress(self, share: float) -> None:
        """This share of the current epoch is done; called often, so return fast."""

    def epoch_ended(self, report: EpochReport) -> None: ...

    def task_ended(self, name: str, accuracies: list[float]) -> None:
        """The task is learned; accuracies (percent) on the tasks that were measured now, this one last."""


class Forwarding(Listener):
    """Passes everything on to another listener; a base for those that change one thing on the way."""

    def __init__(self, listener: Listener) -> None:
        self._to = listener

    def task_started(self, index: int, name: str) -> None:
        self._to.task_started(index, name)

    def epochs_planned(self, epochs: int) -> None:
        self._to.epochs_planned(epochs)

    def phase_started(self, name: str, epochs: int, done: int) -> None:
        self._to.phase_started(name, epochs, done)

    def progress(self, share: float) -> None:
        self._to.progress(share)

    def epoch_ended(self, report: EpochReport) -> None:
        self._to.epoch_ended(report)

    def task_ended(self, name: str, accuracies: list[float]) -> None:
        self._to.task_ended(name, accuracies)
