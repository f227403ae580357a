"""Output of the commands for model directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from decimal import ROUND_DOWN, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exssnet.cli.console import print_json, print_table, say
from exssnet.store.plan import LayerPlan
from exssnet.store.routes.auto import UNKNOWN

if TYPE_CHECKING:
    from exssnet.store.format.stored_task import StoredTask
    from exssnet.store.plan import Plan
    from exssnet.store.predictions import Accuracy, Answer, RoutedAnswer
    from exssnet.store.stored_model import Removed, StoredModel
    from exssnet.store.verify import Report

NONE = "–"


def print_learned(model: StoredModel, task: StoredTask, as_json: bool) -> None:
    """Print a new task and the free weights."""
    free = model.model.free
    if as_json:
        print_json(_facts(task) | {"free": free, "routing": task.card.get("routing")})
        return
    accuracy = (
        f", accuracy {task.accuracy:.1f} % on {task.card['held_out']} held out" if task.accuracy is not None else ""
    )
    say(f"learned {task.name}: {len(task.labels)} classes, {task.examples} examples{accuracy}")
    start = f", starting from the mask of {task.lender}" if task.lender else ""
    say(f"{task.trained_weights:,} weights trained{start}; {100 * free:.1f} % of all weights are free")
    earlier = "; earlier tasks verified unchanged" if len(model.tasks) > 1 else ""
    print(f"{bytes_(task.size)} on disk, digest {task.digest[:16]}{earlier}")


def print_removed(removed: Removed | None, task: str) -> None:
    """Print what a removed task freed and left."""
    if removed is None:
        say(f"removed {task}, which could not be read")
        return
    say(f"removed {task}: {removed.freed:,} weights are free again; all other tasks verified unchanged")
    if removed.staying:
        say(f"{removed.staying:,} values trained on it stay, because masks of other tasks use them")
    if removed.undoable:
        say("its files stay until the next change: `exssnet rollback` restores it")
    else:
        say("its files are deleted, because the disk was full: it cannot be restored")


def print_tasks(model: StoredModel, as_json: bool) -> None:
    """Print a row per task."""
    tasks, found = model.tasks, model.found_shares()
    if as_json:
        print_json([_facts(task) | {"auto": found.get(task.name)} for task in tasks])
        return
    if not model.manifest.tasks:
        say(f"{model.path} has no tasks")
        return
    rows = [
        (
            task.name, str(len(task.labels)), NONE if task.accuracy is None else f"{task.accuracy:.1f}",
            f"{100 * found[task.name]:.1f}" if task.name in found else NONE, task.lender or NONE,
            NONE if task.overlap is None else f"{100 * task.overlap:.1f}", f"{task.trained_weights:,}",
            bytes_(task.size), task.date[:10],
        )
        for task in tasks
    ]  # fmt: skip
    print_table(
        ("task", ">classes", ">accuracy %", ">auto %", "lender", ">overlap %", ">trained", ">size", "date"), rows
    )
    network = model.base.network or "your own network"
    size = sum(file.size for file in model.manifest.files())
    say(f"{_count(len(tasks), 'task')} on {network}, {bytes_(size)} in all")


def _facts(task: StoredTask) -> dict[str, Any]:
    found = asdict(task)
    found.pop("card")
    return found


def print_answers(answers: Sequence[Answer], as_json: bool) -> None:
    """Print a row per input: the label, and the next ones."""
    if as_json:
        print_json([asdict(answer) for answer in answers])
        return
    rows = [(answer.name, answer.label, f"{answer.probability:.3f}", _others(answer)) for answer in answers]
    print_table(("input", "label", ">probability", "next"), rows)


def print_routed(answers: Sequence[RoutedAnswer], as_json: bool) -> None:
    """Print a row per input: task, label and the next labels; of an unknown task the best guess."""
    if as_json:
        print_json([asdict(answer) for answer in answers])
        return
    rows = []
    for answer in answers:
        routing = NONE if answer.routing is None else f"{answer.routing:.3f}"
        of = answer.likeliest
        if answer.task is None:
            rows.append(
                (answer.name, UNKNOWN, routing, NONE, NONE, f"perhaps {of.task}: {of.label} {of.probability:.3f}")
            )
        else:
            rows.append((answer.name, of.task, routing, of.label, f"{of.probability:.3f}", _others(of)))
    print_table(("input", "task", ">routing", "label", ">probability", "next"), rows)


def _others(answer: Answer) -> str:
    ranked = sorted(answer.probabilities.items(), key=lambda pair: -pair[1])
    return ", ".join([f"{label} {share:.3f}" for label, share in ranked if label != answer.label][:2])


def print_accuracies(found: Sequence[Accuracy], as_json: bool) -> None:
    """Print a row per task, and one for all with --task auto."""
    if as_json:
        print_json([asdict(row) for row in found])
        return
    columns: list[tuple[str, Callable[[Accuracy], str]]] = [
        ("task", lambda row: row.task or "all"),
        (">examples", lambda row: f"{row.examples:,}"),
        (">task found %", lambda row: _two(row.task_accuracy)),
        (">accuracy %", lambda row: _two(row.accuracy)),
        (">unknown %", lambda row: _two(row.unknown)),
        (">accuracy of the rest %", lambda row: _two(row.answered_accuracy)),
    ]
    filled = [(name, cell) for name, cell in columns if any(cell(row) != NONE for row in found)]
    print_table([name for name, _ in filled], [[cell(row) for _, cell in filled] for row in found])


def _two(share: float | None) -> str:
    return NONE if share is None else f"{share:.2f}"


def print_report(report: Report, path: Path, as_json: bool) -> None:
    """Print the result of a check."""
    if as_json:
        known = None if report.tasks is None else list(report.tasks.digests)
        summary = {"verified": report.verified, "files": report.files, "bytes": report.bytes, "tasks": known}
        print_json(summary | {"problems": [asdict(problem) for problem in report.problems]})
        return
    for problem in report.problems:
        say(str(problem))
    if report.problems:
        say(f"{path}: {_count(len(report.problems), 'damaged file')} of {report.files}")
        return
    tasks = "tasks not computed: give --network"
    if report.tasks is not None:
        tasks = f"{_count(len(report.tasks.digests), 'task')}, all unchanged since learned"
    say(f"{path}: {_count(report.files, 'file')}, {bytes_(report.bytes)}, all digests match; {tasks}")


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print free weights per layer, and the cost of further tasks."""
    if as_json:
        sums = {"size": plan.size, "free": plan.free, "expected": plan.expected, "bytes": plan.bytes}
        print_json(asdict(plan) | sums)
        return
    more = _count(plan.tasks, "more task")
    rows = [
        (layer.name, f"{layer.size:,}", f"{layer.free:,}", f"{100 * layer.free / layer.size:.1f}",
         f"{layer.expected:,.0f}", f"{100 * layer.expected / layer.size:.1f}")
        for layer in [*plan.layers, LayerPlan("all", plan.size, plan.free, plan.expected)]
    ]  # fmt: skip
    print_table(("layer", ">weights", ">free", ">%", f">after {more}", ">%"), rows)
    print(f"{more} at density {plan.density:g}, if they share little with the others:")
    print(f"  the last mask overlaps {100 * plan.overlap:.0f} % with earlier masks")
    print(
        f"  {bytes_(plan.bytes)} on disk: masks {bytes_(plan.mask_bytes)}, weights {bytes_(plan.weight_bytes)}, "
        f"private tensors {bytes_(plan.private_bytes)}, cards {bytes_(plan.card_bytes)}"
    )
    if plan.fitting is None:
        print("at no density will half the weights of the last task be free")
    else:
        digits = Context(prec=2, rounding=ROUND_DOWN).create_decimal_from_float(plan.fitting)
        density = f"density {digits} or less" if plan.fitting < 1 else "any density"
        print(f"at {density} half the weights of the last task are free")


def bytes_(size: float) -> str:
    """Format a size with a unit."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
