"""Questions to a model that come in files: what is this, of which task, and how often is the answer right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exssnet.data.files import read_inputs
from exssnet.errors import InputError
from exssnet.store.reader import Reader

AUTO = "auto"


@dataclass(frozen=True)
class Answer:
    """The label of one input, with its probability, and those of all labels of the task."""

    name: str
    task: str
    label: str
    probability: float
    probabilities: dict[str, float]


def answers(model: Reader, paths: Sequence[Path], task: str, rule: str = "confident") -> list[Answer]:
    """What the inputs in some files are; with the task `auto` the rule finds the task of each."""
    if not model.tasks:
        raise InputError(f"{model.path} has no task yet: learn one first")
    card = model.tasks[0].card if task == AUTO else model.task(task).card
    inputs, names = read_inputs(list(paths), card["recipe"])
    if task == AUTO:
        routed = model.route(inputs, rule)
        tasks = [routed.tasks[int(choice)] for choice in routed.choice]
    else:
        tasks = [task] * len(names)
    found: dict[int, Answer] = {}
    for of in dict.fromkeys(tasks):
        rows = [row for row, one in enumerate(tasks) if one == of]
        labels = model.task(of).labels
        for row, share in zip(rows, model.probabilities(inputs[rows], of).cpu(), strict=True):
            best = int(share.argmax())
            every = dict(zip(labels, share.tolist(), strict=True))
            found[row] = Answer(names[row], of, labels[best], every[labels[best]], every)
    return [found[row] for row in range(len(names))]


def evaluate_routed(
    model: Reader, data: Mapping[str, Path], rule: str = "confident", label: str | None = None
) -> dict[str, dict[str, float]]:
    """Per task, and for all: how often the task is found, and how often task and class are."""
    found: dict[str, dict[str, float]] = {}
    rows = right_task = right = 0
    for task, path in data.items():
        inputs, labels = model.examples(path, task, label)
        routed = model.route(inputs, rule)
        own = routed.choice.cpu() == routed.tasks.index(task)
        correct = own & (model.predict(inputs, task).cpu() == labels)
        shares = [100 * float(part.double().mean()) for part in (own, correct)]
        found[task] = dict(zip(("task_accuracy", "accuracy"), shares, strict=True))
        rows, right_task, right = rows + len(labels), right_task + int(own.sum()), right + int(correct.sum())
    if len(found) > 1:
        found["all"] = {"task_accuracy": 100 * right_task / rows, "accuracy": 100 * right / rows}
    return found
