"""Predictions for inputs of unknown task: the task, its probability, and its prediction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exssnet.errors import InputError
from exssnet.store.routes.measured import RULE, probabilities

if TYPE_CHECKING:
    from exssnet.data.files.examples import Array
    from exssnet.store.reader import Reader

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Choice:
    """The most likely task of each input."""

    candidates: tuple[str, ...]
    best: Tensor  # int64 [N], index into `candidates`
    routing: Tensor | None  # probability of each candidate [N, candidates]; None if not measured
    threshold: float | None  # the task is unknown below it
    known: Tensor  # bool [N]

    @property
    def likely(self) -> Tensor | None:
        """The probability of the best [N]."""
        return None if self.routing is None else self.routing.gather(1, self.best[:, None])[:, 0]


@dataclass(frozen=True)
class Found:
    """Result of `predict` with the task "auto". The probability of a class is given the task."""

    tasks: tuple[str | None, ...]  # None if unknown
    classes: Tensor  # int64 [N], from 0 within the task; -1 if unknown
    probabilities: Tensor  # [N], of the class, given the task; NaN if the task is unknown
    routing: Tensor | None  # [N], of the task; None if not measured
    choice: Choice = field(repr=False)

    def __repr__(self) -> str:
        counts = Counter(task or UNKNOWN for task in self.tasks)
        told = ", ".join(f"{task} {count}" for task, count in counts.most_common(5))
        more = ", ..." if len(counts) > 5 else ""
        return f"Found({len(self.tasks)} inputs: {told}{more})"


def choose(reader: Reader, x: Array, rule: str = RULE, threshold: float | None = None) -> Choice:
    """Find the task of each input, or unknown below the threshold."""
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(f"threshold is {threshold}: give a probability from 0 to 1")
    routed = reader.route(x, rule)
    measured = reader.measured if rule == RULE else None
    best, every = routed.choice.cpu(), torch.ones(len(routed.choice), dtype=torch.bool)
    if measured is None or measured.temperature is None:
        if threshold is not None:
            raise InputError(
                f"threshold is {threshold}, but routing was not measured: remove the threshold, or use the rule "
                f"'{RULE}' after learning a task with held-out inputs"
            )
        return Choice(routed.tasks, best, None, None, every)
    threshold = measured.threshold if threshold is None else threshold
    choice = Choice(routed.tasks, best, probabilities(routed.scores.cpu(), measured.temperature), threshold, every)
    assert choice.likely is not None
    assert threshold is not None
    return Choice(choice.candidates, best, choice.routing, threshold, choice.likely >= threshold)


def find(reader: Reader, x: Array, rule: str = RULE, threshold: float | None = None) -> Found:
    """Predict the task and the class of each input."""
    choice = choose(reader, x, rule, threshold)
    classes = torch.full_like(choice.best, -1)
    share = torch.full(choice.best.shape, float("nan"))
    for place in sorted(set(choice.best[choice.known].tolist())):
        rows = (choice.known & (choice.best == place)).nonzero().view(-1)
        found = reader.probabilities(x[rows.tolist()], choice.candidates[place]).cpu().max(1)
        classes[rows], share[rows] = found.indices, found.values.float()
    tasks = tuple(
        choice.candidates[place] if known else None
        for place, known in zip(choice.best.tolist(), choice.known.tolist(), strict=True)
    )
    return Found(tasks, classes, share, choice.likely, choice)
