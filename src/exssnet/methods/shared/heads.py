"""Which outputs of a network belong to which task.

* `task`: every task has outputs of its own, and is trained and tested on them alone;
* `masked-test`: the same outputs, but trained against those of all tasks, also of tasks to come; only the test knows
  the task. The published baselines of the vision tables were trained so;
* `shared`: all tasks use the same outputs, from the first one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

HEADS = ("task", "masked-test", "shared")


class Head:
    """The outputs of a stream's tasks."""

    def __init__(self, kind: str, classes: Sequence[int]) -> None:
        self.kind = kind
        starts = [0] * len(classes) if kind == "shared" else [0, *accumulate(classes)][:-1]
        self.slices = [slice(start, start + count) for start, count in zip(starts, classes, strict=True)]
        self.size = max(own.stop for own in self.slices)

    def trained(self, task: int) -> slice:
        """The outputs that a task's examples are trained on."""
        return slice(0, self.size) if self.kind == "masked-test" else self.slices[task]

    def rivals(self) -> Tensor:
        """Per output, which outputs its examples are trained against: bool [O, O]."""
        if self.kind != "task":
            return torch.ones(self.size, self.size, dtype=torch.bool)
        task = torch.cat([torch.full((own.stop - own.start,), i) for i, own in enumerate(self.slices)])
        return task[:, None] == task
