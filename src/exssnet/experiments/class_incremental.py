"""Tests that do not name the task: mask methods find it by routing, others answer among the classes of all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from exssnet.core.engine import at_once
from exssnet.core.routing.rules import route
from exssnet.methods.masks._base import Isolated
from exssnet.methods.text._base import AllClasses

if TYPE_CHECKING:
    from exssnet.data.tasks import Data, Stream
    from exssnet.methods import Method


@dataclass(frozen=True)
class Found:
    """In percent of a task's test examples."""

    accuracy: float  # whose class was found, among those of all tasks learned so far
    identified: float | None  # whose task was found; None: not asked for


def class_incremental(method: Method, stream: Stream, index: int, test: Data, rule: str) -> Found:
    """Test a learned task without naming it.

    A class is right where it has the stream's own number of the label: tasks that share classes may answer for each
    other.
    """
    if isinstance(method, AllClasses):
        return Found(_among_all(method, stream.class_order[index], test), None)
    assert isinstance(method, Isolated)
    network = method.network
    places = {stream.task_name(place): place for place in range(len(stream))}
    device = test.device
    table = torch.full((len(stream), stream.max_classes), -1, device=device)
    for place, numbers in enumerate(stream.class_order):
        table[place, : len(numbers)] = torch.tensor(numbers, device=device)
    right = torch.zeros(2, dtype=torch.int64, device=device)
    for rows in torch.split(torch.arange(len(test), device=device), at_once(test.shape, device)):
        x, y = test.batch(rows)
        routed = route(network, x, rule)
        chosen = torch.tensor([places[name] for name in routed.tasks], device=device)[routed.choice]
        answers = torch.full_like(y, -1)
        for name in routed.tasks:
            mine = chosen == places[name]
            if mine.any():
                answers[mine] = table[places[name]][network.logits(x[mine], name).argmax(1)]
        right += torch.stack(((answers == table[index][y]).sum(), (chosen == index).sum()))
    accuracy, identified = (100 * right.double() / len(test)).tolist()
    return Found(accuracy, identified)


def _among_all(method: AllClasses, numbers: Sequence[int], test: Data) -> float:
    """Percent of the examples for which the method names the stream's own class."""
    own = torch.tensor(numbers, device=test.device)
    right = torch.zeros((), dtype=torch.int64, device=test.device)
    for rows in torch.split(torch.arange(len(test), device=test.device), at_once(test.shape, test.device)):
        x, y = test.batch(rows)
        right += (method.answers(x) == own[y]).sum()
    return 100 * int(right) / len(test)
