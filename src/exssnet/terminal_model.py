"""What the command line shows of a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from exssnet.train.listener import EpochReport, Listener

if TYPE_CHECKING:
    from exssnet.store.ask import Answer
    from exssnet.store.model import StoredModel
    from exssnet.store.plan import Plan
    from exssnet.store.reader import StoredTask
    from exssnet.store.verify import Report

NONE = "–"


@contextmanager
def progress(task: str, epochs: int, quiet: bool) -> Iterator[Listener]:
    """A bar on standard error while a task is learned; nothing where that is no terminal."""
    from exssnet.terminal import bars

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Listener()
        return
    with bars(console) as found:
        yield _Bar(found, task, epochs)


class _Bar(Listener):
    """Epochs of both phases, with loss and accuracies."""

    def __init__(self, bars: Any, task: str, epochs: int) -> None:
        self._bars, self._bar = bars, bars.add_task(task, total=epochs, now="")
        self._before, self._phase, self._epoch, self._epochs, self._scores = 0, "", 0, 0, ""

    def phase_started(self, name: str, epochs: int, done: int) -> None:
        self._before, self._phase, self._epochs, self._epoch = self._before + self._epochs, name, epochs, done

    def progress(self, share: float) -> None:
        now = f"{self._phase} {min(self._epoch + 1, self._epochs)}/{self._epochs} {self._scores}"
        self._bars.update(self._bar, completed=self._before + self._epoch + share, now=now)

    def epoch_ended(self, report: EpochReport) -> None:
        held_out = "" if report.validation is None else f" held out {report.validation:.1f} %"
        self._scores = f"loss {report.loss:.3f} acc {report.accuracy:.1f} %{held_out}"
        self._epoch = report.epoch


def print_learned(model: StoredModel, task: StoredTask, as_json: bool) -> None:
    """A new task, and what it leaves."""
    free = model.model.free
    if as_json:
        print(json.dumps(_told(task) | {"free": free, "digest": task.digest}, ensure_ascii=False))
        return
    accuracy = (
        f", {task.accuracy:.1f} % right on the {task.card['held_out']} held out" if task.accuracy is not None else ""
    )
    print(f"learned {task.name}: {len(task.labels)} classes, {task.examples} examples{accuracy}")
    lender = f" starting from {task.lender}," if task.lender else ""
    print(
        f"mask:{lender} {task.trained_weights:,} weights trained, {bytes_(task.size)}; "
        f"{100 * free:.1f} % of all weights are free"
    )
    print(f"digest {task.digest[:16]}; earlier tasks verified unchanged")


def print_tasks(model: StoredModel, as_json: bool) -> None:
    """A row per task."""
    tasks = model.tasks
    if as_json:
        print(json.dumps([_told(task) for task in tasks], ensure_ascii=False))
        return
    if not tasks:
        print(f"{model.path} has no task yet")
        return
    table = _table("task", ">classes", ">accuracy %", "lender", ">overlap %", ">trained", ">size", "date")
    for task in tasks:
        accuracy = NONE if task.accuracy is None else f"{task.accuracy:.1f}"
        overlap = NONE if task.overlap is None else f"{100 * task.overlap:.1f}"
        row = [task.name, str(len(task.labels)), accuracy, task.lender or NONE, overlap, f"{task.trained_weights:,}"]
        table.add_row(*row, bytes_(task.size), task.date[:10])
    _print(table)
    network = model.base.network or "a network of your own"
    size = sum(file.size for file in model.manifest.files())
    print(f"{len(tasks)} task{'s' * (len(tasks) > 1)} on {network}, {bytes_(size)} in all")


def _told(task: StoredTask) -> dict[str, Any]:
    found = asdict(task)
    found.pop("card")
    return found


def print_answers(answers: Sequence[Answer], as_json: bool) -> None:
    """A row per input: the label, and the next ones."""
    if as_json:
        print(json.dumps([asdict(answer) for answer in answers], ensure_ascii=False))
        return
    several = len({answer.task for answer in answers}) > 1
    table = _table("input", *(["task"] if several else []), "label", ">probability", "then")
    for answer in answers:
        ranked = sorted(answer.probabilities.items(), key=lambda pair: -pair[1])[1:3]
        then = ", ".join(f"{label} {share:.2f}" for label, share in ranked)
        task = [answer.task] if several else []
        table.add_row(answer.name, *task, answer.label, f"{answer.probability:.3f}", then)
    _print(table)
    if not several and answers:
        print(f"task {answers[0].task}")


def print_accuracies(found: Mapping[str, Mapping[str, float]], as_json: bool) -> None:
    """A row per task."""
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    routed = any("task_accuracy" in row for row in found.values())
    table = _table("task", *([">task found %"] if routed else []), ">accuracy %")
    for task, row in found.items():
        table.add_row(task, *([f"{row['task_accuracy']:.2f}"] if routed else []), f"{row['accuracy']:.2f}")
    _print(table)


def print_report(report: Report, path: Path, as_json: bool) -> None:
    """What a check found."""
    if as_json:
        told = {"verified": report.verified, "files": report.files, "bytes": report.bytes}
        print(json.dumps(told | {"problems": [asdict(problem) for problem in report.problems]}, ensure_ascii=False))
        return
    for problem in report.problems:
        print(f"{problem}")
    if report.verified:
        known = len(report.tasks.digests) if report.tasks is not None else None
        tasks = f"tasks: {known}, each what it was when it was learned" if known is not None else (
            "the tasks themselves were not computed: that needs --network"
        )  # fmt: skip
        print(f"{path}: {report.files} files, {bytes_(report.bytes)}, every byte as written; {tasks}")
    else:
        print(f"{path}: {len(report.problems)} of {report.files} files are damaged")


def print_plan(plan: Plan, as_json: bool) -> None:
    """Layers, and what it amounts to."""
    if as_json:
        print(json.dumps(asdict(plan)))
        return
    table = _table("layer", ">weights", ">free", ">free %", f">expected after {plan.tasks} tasks")
    for layer in plan.layers:
        table.add_row(layer.name, f"{layer.size:,}", f"{layer.free:,}", f"{100 * layer.free / layer.size:.1f}",
                      f"{layer.expected:,.0f}")  # fmt: skip
    _print(table)
    print(f"{plan.free:,} of {plan.size:,} weights are free ({100 * plan.free / plan.size:.1f} %)")
    print(
        f"{plan.tasks} more tasks at density {plan.density:g} would leave about {plan.expected:,.0f} free; "
        f"the last one's mask would overlap {100 * plan.overlap:.0f} %"
    )
    size = plan.mask_bytes + plan.weight_bytes + plan.private_bytes
    print(
        f"they would take about {bytes_(size)}: masks {bytes_(plan.mask_bytes)}, weights {bytes_(plan.weight_bytes)}, "
        f"private tensors {bytes_(plan.private_bytes)}"
    )
    if plan.fitting is None:
        print("less than half of the weights are free: no density leaves the last task half of its weights")
    else:
        print(f"at density {plan.fitting:.3f} or less the last one would still find half of its weights free")


def bytes_(size: float) -> str:
    """A size for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _print(table: Table) -> None:
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
