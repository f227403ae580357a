"""Progress of training: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from exssnet.cli.console import rich_console
from exssnet.errors import printable
from exssnet.train.listener import EpochReport, Listener

if TYPE_CHECKING:
    from rich.progress import Progress

    from exssnet.experiments.config import RunConfig

BAR_SECONDS = 0.1  # between two updates of a bar
LINE_SECONDS = 5.0  # between two lines


@contextmanager
def of_runs(configs: Sequence[RunConfig], quiet: bool) -> Iterator[list[Listener]]:
    """Make a listener for each run."""
    from exssnet.methods import parse

    if quiet:
        yield [Listener() for _ in configs]
        return
    with _displays() as display:
        listeners: list[Listener] = []
        for config in configs:
            kind, _ = parse(config.method)
            per_task = kind.settings_type(**config.settings).epochs_per_task
            name = f"{config.method} seed {config.seed}"
            listeners.append(Epochs(display(name), per_task, config.tasks))
        yield listeners


@contextmanager
def of_task(task: str, quiet: bool) -> Iterator[Listener]:
    """Make a listener for one task."""
    if quiet:
        yield Listener()
        return
    with _displays() as display:
        yield Epochs(display(f"learning {task}"))


@contextmanager
def of_encoding(quiet: bool) -> Iterator[None]:
    """Lines on texts that go through an encoder: the first at once, then one every few seconds."""
    from exssnet.encoders import progress

    started: dict[str, tuple[float, int]] = {}  # when a data set was begun, and what was there then
    shown = -math.inf

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        began, before = started.setdefault(what, (now, done))
        if now - shown < LINE_SECONDS and done > before:
            return
        shown = now
        left = f", {_duration((now - began) * (total - done) / (done - before))} left" if done > before else ""
        with suppress(OSError, ValueError):
            print(f"encoding {printable(what)}: {done:,} of {total:,} texts{left}", file=sys.stderr, flush=True)

    if quiet:
        yield
        return
    with progress.told(show):
        yield


class Display(Protocol):
    """Shows progress."""

    def plan(self, epochs: int) -> None:
        """Set the total number of epochs."""

    def due(self) -> bool:
        """Whether enough time has passed for another update."""

    def show(self, done: float, state: str) -> None:
        """Show the number of finished epochs and the current state."""

    def end(self) -> None:
        """End the display."""


class Epochs(Listener):
    """Reports task, phase, epoch, loss and accuracies, and the number of finished epochs."""

    def __init__(self, display: Display, per_task: int = 0, tasks: int = 0) -> None:
        self._display, self._per_task, self._tasks = display, per_task, tasks
        display.plan(tasks * per_task)
        self._before = 0  # epochs of finished tasks and phases
        self._task, self._phase, self._scores = "", "", ""
        self._epoch, self._epochs, self._at = 0, 0, 0

    def task_started(self, index: int, name: str) -> None:
        self._at = index
        if self._tasks:
            self._task = f"task {index + 1}/{self._tasks} "
            self._before, self._epoch, self._epochs = index * self._per_task, 0, 0

    def epochs_planned(self, epochs: int) -> None:
        self._display.plan(epochs)

    def phase_started(self, name: str, epochs: int, done: int) -> None:
        self._before += self._epochs
        self._phase, self._epochs, self._epoch = name, epochs, done
        self.progress(0.0)

    def progress(self, share: float) -> None:
        if self._display.due():
            epoch = min(self._epoch + 1, self._epochs)
            state = f"{self._task}{self._phase} {epoch}/{self._epochs}{self._scores}"
            self._display.show(self._before + self._epoch + share, state)

    def epoch_ended(self, report: EpochReport) -> None:
        held_out = "" if report.validation is None else f" held out {report.validation:.1f} %"
        self._scores = f" loss {report.loss:.3f} acc {report.accuracy:.1f} %{held_out}"
        self._epoch = report.epoch
        self.progress(0.0)

    def task_ended(self, name: str, accuracies: list[float]) -> None:
        if self._tasks and self._at + 1 == self._tasks:
            self._display.end()


@contextmanager
def _displays() -> Iterator[Callable[[str], Display]]:
    """Yield a maker of displays by name: a bar on a terminal, otherwise lines."""
    console = rich_console(stderr=True)
    if not console.is_terminal:
        yield Lines
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[now]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:  # they disappear when done
        yield lambda name: Bar(bars, name)


class Bar:
    """One of several bars, visible while its run is active."""

    def __init__(self, bars: Progress, name: str) -> None:
        self._bars, self._shown = bars, -math.inf
        self._bar = bars.add_task(printable(name), total=None, now="", start=False, visible=False)

    def plan(self, epochs: int) -> None:
        self._bars.update(self._bar, total=epochs)

    def due(self) -> bool:
        return time.monotonic() - self._shown >= BAR_SECONDS

    def show(self, done: float, state: str) -> None:
        if self._shown == -math.inf:
            self._bars.start_task(self._bar)
        self._shown = time.monotonic()
        self._bars.update(self._bar, completed=done, now=state, visible=True)

    def end(self) -> None:
        self._bars.update(self._bar, visible=False)


class Lines:
    """Prints a line at once and then one every few seconds, for a log or a pipe."""

    def __init__(self, name: str) -> None:
        self._name, self._total = name, 0
        self._shown = -math.inf
        self._start: tuple[float, float] | None = None  # time of the first line, and the epochs finished then

    def plan(self, epochs: int) -> None:
        self._total = epochs

    def due(self) -> bool:
        return time.monotonic() - self._shown >= LINE_SECONDS

    def show(self, done: float, state: str) -> None:
        self._shown = now = time.monotonic()
        began, before = self._start = self._start or (now, done)
        share = f", {100 * done / self._total:.0f} % done" if self._total else ""
        if share and done > before:
            share += f", {_duration((now - began) * (self._total - done) / (done - before))} left"
        with suppress(OSError, ValueError):  # standard error is closed: training continues
            print(f"{printable(self._name)}: {state}{share}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Shows nothing."""


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
