"""Examples of different lengths: sorted by length, so that batches are of like lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet.data.tasks import Data

POOL = 64  # batches' worth of examples that are sorted by length together


class ByLength(Data):
    """Rows of something under a task's labels, the shortest first."""

    def __init__(self, lengths: Tensor, rows: Tensor, labels: Tensor, classes: int) -> None:
        """`lengths` int64 [N] on the CPU, `rows` and `labels` belong together; their order does not matter."""
        order = lengths.argsort(stable=True)
        self.labels = labels[order.to(labels.device)]
        self.classes = classes
        self.lengths = lengths[order]
        self._rows = rows.cpu()[order]

    def order(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """All examples in batches of like lengths, the batches in random order.

        Drawn at random, sorted within pools of 64 batches, and cut into batches. An epoch's last, smaller batch is
        drawn before, from all lengths.
        """
        drawn = torch.randperm(len(self), generator=generator)
        whole = len(self) // batch_size * batch_size
        rest, drawn = drawn[whole:], drawn[:whole]
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in torch.split(drawn, POOL * batch_size)]
        batches = [batch for pool in pools for batch in torch.split(pool, batch_size)]
        turns = torch.randperm(len(batches), generator=generator).tolist()
        return torch.cat([*(batches[turn] for turn in turns), rest])
