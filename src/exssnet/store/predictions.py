"""Predictions and accuracies for files: the task and label of each input, and how often they are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exssnet.data.files.labelled import read_inputs
from exssnet.errors import InputError
from exssnet.store.format.card import distinct
from exssnet.store.reader import Reader
from exssnet.store.routes.auto import choose
from exssnet.store.routes.measured import RULE

MOST_CANDIDATES = 5  # tasks listed in a prediction


@dataclass(frozen=True)
class Answer:
    """The label of one input with its probability, and the probabilities of all labels of the task."""

    name: str
    task: str
    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class RoutedAnswer:
    """The label of one input whose task was found by a rule. `likeliest` is the best guess for an unknown task."""

    name: str
    task: str | None  # None if unknown
    routing: float | None  # probability of the task; None if not measured
    label: str | None
    probability: float | None  # of the label, given the task
    probabilities: dict[str, float]  # of all labels of the task; empty if unknown
    likeliest: Answer
    candidates: dict[str, float]  # the most likely tasks with their probabilities


def answers(model: Reader, paths: Sequence[Path], task: str) -> list[Answer]:
    """Predict the labels of the inputs in some files."""
    inputs, names = _read(model, paths, task)
    return _answers(model, inputs, names, [task] * len(names))


def routed_answers(
    model: Reader, paths: Sequence[Path], rule: str = RULE, threshold: float | None = None
) -> list[RoutedAnswer]:
    """Predict the labels of the inputs in some files; the rule finds the task of each."""
    known = model.manifest.tasks
    if not known:
        raise InputError(f"{model.path} has no tasks: learn one first")
    inputs, names = _read(model, paths, known[0].name)
    choice = choose(model, inputs, rule, threshold)
    tasks = [choice.candidates[position] for position in choice.best.tolist()]
    found = []
    for row, answer in enumerate(_answers(model, inputs, names, tasks)):
        every = (
            {} if choice.routing is None else dict(zip(choice.candidates, choice.routing[row].tolist(), strict=True))
        )
        sure = bool(choice.known[row])
        found.append(RoutedAnswer(
            answer.name, answer.task if sure else None, every.get(answer.task), answer.label if sure else None,
            answer.probability if sure else None, answer.probabilities if sure else {}, answer,
            dict(sorted(every.items(), key=lambda pair: -pair[1])[:MOST_CANDIDATES]),
        ))  # fmt: skip
    return found


def _read(model: Reader, paths: Sequence[Path], task: str) -> tuple[Tensor, list[str]]:
    return read_inputs(list(paths), model.card(task)["recipe"])


def _answers(model: Reader, inputs: Tensor, names: Sequence[str], tasks: Sequence[str]) -> list[Answer]:
    """Make a prediction for every input of a task."""
    found: dict[int, Answer] = {}
    for of in dict.fromkeys(tasks):
        rows = [row for row, one in enumerate(tasks) if one == of]
        labels = distinct(model.card(of)["labels"])
        for row, share in zip(rows, model.probabilities(inputs[rows], of).cpu(), strict=True):
            best = int(share.argmax())
            every = dict(zip(labels, share.tolist(), strict=True))
            found[row] = Answer(names[row], of, labels[best], every[labels[best]], every)
    return [found[row] for row in range(len(names))]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy in percent, and with a rule that finds the task, how often it was found."""

    task: str | None  # None: all tasks together
    examples: int
    accuracy: float
    task_accuracy: float | None = None
    unknown: float | None = None  # with a rule, if routing was measured
    answered_accuracy: float | None = None  # of the other inputs; None if there are none


def evaluate(model: Reader, path: Path, task: str, label: str | None = None, labels: Path | None = None) -> Accuracy:
    """Measure the accuracy of a task on labelled files."""
    inputs, numbers = model.examples(path, task, label, labels)
    return Accuracy(task, len(numbers), model.evaluate((inputs, numbers), task))


def evaluate_routed(
    model: Reader, data: Mapping[str, Path], rule: str = RULE, label: str | None = None,
    threshold: float | None = None,
) -> list[Accuracy]:  # fmt: skip
    """Measure per task and for all tasks how often the task, and the task and class, are found."""
    rows: dict[str, _Rows] = {}
    for task, path in data.items():
        inputs, numbers = model.examples(path, task, label)
        choice = choose(model, inputs, rule, threshold)
        own = choice.best == choice.candidates.index(task)
        right = own & (model.predict(inputs, task).cpu() == numbers)
        rows[task] = _Rows(own, right, choice.known if choice.routing is not None else None)
    found = [rows[task].accuracy(task) for task in data]
    if len(found) > 1:
        known = [part.known for part in rows.values() if part.known is not None]
        every = _Rows(
            torch.cat([part.own for part in rows.values()]), torch.cat([part.right for part in rows.values()]),
            torch.cat(known) if known else None,
        )  # fmt: skip
        found.append(every.accuracy(None))
    return found


@dataclass(frozen=True)
class _Rows:
    """For each row: whether the task is right, whether the class is too, and whether the task is known."""

    own: Tensor
    right: Tensor
    known: Tensor | None

    def accuracy(self, task: str | None) -> Accuracy:
        right, own = _percent(self.right), _percent(self.own)
        if self.known is None:
            return Accuracy(task, len(self.own), right, own)
        answered = _percent(self.right[self.known]) if bool(self.known.any()) else None
        return Accuracy(task, len(self.own), right, own, 100 - _percent(self.known), answered)


def _percent(hits: Tensor) -> float:
    return 100 * float(hits.double().mean())
