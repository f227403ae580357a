"""What the command line shows: progress while a run goes on, tables when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from exssnet.experiments.config import RunConfig
from exssnet.methods import parse
from exssnet.train.listener import EpochReport, Listener

REFRESH_SECONDS = 0.1


@contextmanager
def progress(configs: Sequence[RunConfig], quiet: bool) -> Iterator[list[Listener]]:
    """A bar for each run that is under way, on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield [Listener() for _ in configs]
        return
    with bars(console) as found:
        yield [_Bar(found, config) for config in configs]


def bars(console: Console) -> Progress:
    """Bars that vanish when they are done: what, how far, `now`, time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


class _Bar(Listener):
    """One bar in units of epochs: task, phase, epoch, loss, accuracy, time left."""

    def __init__(self, bars: Progress, config: RunConfig) -> None:
        kind, _ = parse(config.method)
        self._per_task = kind.planned_epochs(kind.settings_type(**config.settings))
        self._tasks = config.tasks
        self._bars = bars
        self._bar = bars.add_task(f"{config.method} seed {config.seed}", total=self._tasks * self._per_task, now="",
                                   start=False, visible=False)  # fmt: skip
        self._before = 0  # epochs of tasks and phases behind us
        self._task, self._phase, self._scores = "", "", ""
        self._epoch, self._epochs = 0, 0
        self._shown = 0.0

    def task_started(self, index: int, name: str) -> None:
        self._bars.start_task(self._bar)
        self._bars.update(self._bar, visible=True)
        self._task = f"task {index + 1}/{self._tasks}"
        self._before, self._epoch, self._epochs = index * self._per_task, 0, 0

    def phase_started(self, name: str, epochs: int, done: int) -> None:
        self._before += self._epochs
        self._phase, self._epochs, self._epoch = name, epochs, done

    def progress(self, share: float) -> None:
        if time.monotonic() - self._shown > REFRESH_SECONDS:
            self._show(share)

    def epoch_ended(self, report: EpochReport) -> None:
        self._scores = f"loss {report.loss:.3f} acc {report.accuracy:.1f} %"
        if report.validation is not None:
            self._scores += f" val {report.validation:.1f} %"
        self._epoch = report.epoch
        self._show(0.0)

    def task_ended(self, name: str, accuracies: list[float]) -> None:
        if name == f"task{self._tasks}":
            self._bars.update(self._bar, visible=False)

    def _show(self, share: float) -> None:
        self._shown = time.monotonic()
        epoch = min(self._epoch + 1, self._epochs)
        now = f"{self._task} {self._phase} {epoch}/{self._epochs} {self._scores}"
        self._bars.update(self._bar, completed=self._before + self._epoch + share, now=now)


def print_names(descriptions: Mapping[str, str]) -> None:
    """Names with one line each."""
    table = Table.grid(padding=(0, 2))
    for name, text in descriptions.items():
        table.add_row(name, text)
    Console(soft_wrap=not Console().is_terminal).print(table)


def print_record(record: Mapping[str, Any], folder: Path) -> None:
    """One run: a row per task, then what it amounts to and where it lies."""
    console = Console()
    sample = ", a miniature of the benchmark" if record["miniature"] else ""
    title = f"{record['method']} on {record['benchmark']}, seed {record['seed']}{sample}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("task")
    table.add_column("classes")
    for heading in ("learned %", "at the end %", "overlap %"):
        table.add_column(heading, justify="right")
    table.add_column("starts from")
    matrix, overlaps = record["accuracy_matrix"], record["sparse_overlap"]
    for i, classes in enumerate(record["class_order"]):
        lender = (record["transfer"][i]["lender"] if record["transfer"] else None) or "–"
        overlap = "–" if not overlaps or overlaps[i] is None else f"{100 * overlaps[i]:.1f}"
        learned = "–" if matrix[i][i] is None or (matrix[0][0] is None and len(matrix) > 1) else f"{matrix[i][i]:.2f}"
        table.add_row(str(i + 1), _classes(classes), learned, f"{matrix[-1][i]:.2f}", overlap, lender)
    console.print(table)
    console.print(
        f"average accuracy {record['average_accuracy']:.2f} %, forgetting {_two(record['forgetting'])}, "
        f"{record['seconds']['total']:.1f} s on {record['device']}",
        highlight=False,
    )
    console.print(_proof(record), highlight=False)
    console.print(f"run: {folder}", highlight=False, soft_wrap=True)


def _two(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _classes(classes: Sequence[int]) -> str:
    return " ".join(map(str, classes)) if len(classes) <= 5 else f"{len(classes)} classes"


def _proof(record: Mapping[str, Any]) -> str:
    proof = record["zero_forgetting"]
    if proof is None:
        return "zero forgetting: not promised by this method"
    if proof["verified"]:
        return f"zero forgetting: verified, all {len(proof['digests'])} tasks have the digest they were learned with"
    changed = {entry.split(":")[0] for entry in proof["changed"]}
    return f"zero forgetting: no, {len(changed)} of {len(proof['digests'])} tasks changed after they were learned"


def print_summary(records: Sequence[Mapping[str, Any]]) -> None:
    """Mean ± standard deviation over seeds, a row per method, and per head where a method has several."""
    table = Table(title=f"{records[0]['benchmark']}, mean ± std over seeds", title_justify="left", box=None,
                  pad_edge=False, padding=(0, 2, 0, 0))  # fmt: skip
    kinds = dict.fromkeys((record["method"], record["config"]["head"]) for record in records)
    several = len(kinds) > len({method for method, _ in kinds})
    left, accuracy = (("method", "head"), "accuracy %") if several else (("method",), "average accuracy %")
    for heading in (*left, "seeds", accuracy, "forgetting", "overlap %", "seconds"):
        table.add_column(heading, justify="left" if heading in left else "right")
    for method, head in kinds:
        runs = [r for r in records if (r["method"], r["config"]["head"]) == (method, head)]
        overlaps = [100 * r["average_sparse_overlap"] for r in runs if r["average_sparse_overlap"] is not None]
        table.add_row(
            *((method, head.removesuffix("-test")) if several else (method,)),
            str(len(runs)),
            _spread([r["average_accuracy"] for r in runs]),
            _spread([r["forgetting"] for r in runs]) if all(r["forgetting"] is not None for r in runs) else "–",
            _spread(overlaps, 1) if overlaps else "–",
            _spread([r["seconds"]["total"] for r in runs], 1),
        )
    console = Console()
    console.print()
    console.print(table)


def _spread(values: Sequence[float], digits: int = 2) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"
