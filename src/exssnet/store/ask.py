"""Questions to a model that come in files: what is this, of which task, and how often is the answer right."""

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

MOST_CANDIDATES = 5  # tasks that an answer names


@dataclass(frozen=True)
class Answer:
    """The label of one input, with its probability, and those of all labels of the task."""

    name: str
    task: str
    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class RoutedAnswer:
    """The same where the task had to be found. Where it is unknown, `likeliest` is what it would be."""

    name: str
    task: str | None  # None where it is unknown
    routing: float | None  # probability of the task; None where that was not measured
    label: str | None
    probability: float | None  # of the label, given the task
    probabilities: dict[str, float]  # of all labels of the task; none where it is unknown
    likeliest: Answer
    candidates: dict[str, float]  # the likeliest tasks with their probabilities


def answers(model: Reader, paths: Sequence[Path], task: str) -> list[Answer]:
    """What the inputs in some files are."""
    inputs, names = _read(model, paths, task)
    return _answers(model, inputs, names, [task] * len(names))


def routed_answers(
    model: Reader, paths: Sequence[Path], rule: str = RULE, threshold: float | None = None
) -> list[RoutedAnswer]:
    """What the inputs in some files are, the rule finding the task of each."""
    known = model.manifest.tasks
    if not known:
        raise InputError(f"{model.path} has no task yet: learn one first")
    inputs, names = _read(model, paths, known[0].name)
    choice = choose(model, inputs, rule, threshold)
    tasks = [choice.candidates[place] for place in choice.best.tolist()]
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
    """An answer for every input, of its task."""
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
    """In percent: how often the answer is right, and where the task had to be found, how often that was."""

    task: str | None  # None: of all tasks together
    examples: int
    accuracy: float
    task_accuracy: float | None = None
    unknown: float | None = None  # where the task had to be found, and how likely it is was measured
    answered_accuracy: float | None = None  # of the others; None where there are none


def evaluate(model: Reader, path: Path, task: str, label: str | None = None, labels: Path | None = None) -> Accuracy:
    """How often a task is right on labelled files."""
    inputs, numbers = model.examples(path, task, label, labels)
    return Accuracy(task, len(numbers), model.evaluate((inputs, numbers), task))


def evaluate_routed(
    model: Reader, data: Mapping[str, Path], rule: str = RULE, label: str | None = None,
    threshold: float | None = None,
) -> list[Accuracy]:  # fmt: skip
    """Per task, and for all: how often the task is found, and how often task and class are."""
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
    """Of each row whether the task was found, the class too, and whether there is an answer at all."""

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
