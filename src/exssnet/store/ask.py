"""Questions to a model that come in files: what is this, of which task, and how often is the answer right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exssnet.data.files import read_inputs
from exssnet.errors import InputError
from exssnet.store.manifest import AUTO
from exssnet.store.reader import Reader


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
    known = model.manifest.tasks
    if not known:
        raise InputError(f"{model.path} has no task yet: learn one first")
    card = model.card(known[0].name if task == AUTO else task)
    inputs, names = read_inputs(list(paths), card["recipe"])
    if task == AUTO:
        routed = model.route(inputs, rule)
        tasks = [routed.tasks[int(choice)] for choice in routed.choice]
    else:
        tasks = [task] * len(names)
    found: dict[int, Answer] = {}
    for of in dict.fromkeys(tasks):
        rows = [row for row, one in enumerate(tasks) if one == of]
        labels = model.card(of)["labels"]
        for row, share in zip(rows, model.probabilities(inputs[rows], of).cpu(), strict=True):
            best = int(share.argmax())
            every = dict(zip(labels, share.tolist(), strict=True))
            found[row] = Answer(names[row], of, labels[best], every[labels[best]], every)
    return [found[row] for row in range(len(names))]


@dataclass(frozen=True)
class Accuracy:
    """In percent: how often the answer is right, and where the task had to be found, how often that was."""

    task: str | None  # None: of all tasks together
    examples: int
    accuracy: float
    task_accuracy: float | None = None


def evaluate(model: Reader, path: Path, task: str, label: str | None = None, labels: Path | None = None) -> Accuracy:
    """How often a task is right on labelled files."""
    inputs, numbers = model.examples(path, task, label, labels)
    return Accuracy(task, len(numbers), model.evaluate((inputs, numbers), task))


def evaluate_routed(
    model: Reader, data: Mapping[str, Path], rule: str = "confident", label: str | None = None
) -> list[Accuracy]:
    """Per task, and for all: how often the task is found, and how often task and class are."""
    own: dict[str, Tensor] = {}  # bool per row: the task was found
    right: dict[str, Tensor] = {}  # and the class
    for task, path in data.items():
        inputs, numbers = model.examples(path, task, label)
        routed = model.route(inputs, rule)
        own[task] = routed.choice.cpu() == routed.tasks.index(task)
        right[task] = own[task] & (model.predict(inputs, task).cpu() == numbers)
    found = [_accuracy(task, right[task], own[task]) for task in data]
    if len(found) > 1:
        found.append(_accuracy(None, torch.cat([*right.values()]), torch.cat([*own.values()])))
    return found


def _accuracy(task: str | None, right: Tensor, own: Tensor) -> Accuracy:
    return Accuracy(task, len(right), *(100 * float(hits.double().mean()) for hits in (right, own)))
