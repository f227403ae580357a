"""Subnetworks of the methods that give a task weights of its own: PackNet, Piggyback, winning subnetworks.

Like those of `core/subnetwork.py` they hold the weights of earlier tasks outside `parameters()`, and end in an
`OwnSubnetwork`, which a task is committed from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet.core.engine import Weights
from exssnet.core.layout import Layout
from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import OwnSubnetwork, ScoredSubnetwork, Subnetwork


def largest_free(weights: Tensor, free: Tensor, layout: Layout, keep: tuple[int, ...]) -> Tensor:
    """The mask of the largest |w| among the free: keep[l] of layer l, or all that are free; ties to the lower index."""
    magnitude = torch.where(free, weights.detach().abs(), -1.0)
    chosen = torch.zeros_like(free)
    for part, piece, count in zip(layout.slices(chosen), layout.slices(magnitude), keep, strict=True):
        part[piece.argsort(descending=True, stable=True)[:count]] = True
    return chosen & free


class ThresholdSubnetwork(Subnetwork):
    """The mask is where real numbers r, one for each weight, are above a threshold; no weight is learned."""

    def __init__(self, network: MaskedNetwork, task: str, classes: int, start: float, threshold: float) -> None:
        network.check_new(task, classes)
        super().__init__(network, task, classes, network.start_private(task, classes))
        self.real = torch.full_like(network.weights, start).requires_grad_()
        self.threshold = threshold

    def weights(self) -> Weights:
        # the difference is zero, and carries the gradient past the threshold: dL/dr = dL/d(w·m) · w
        bits = self.mask().to(self.real.dtype) + (self.real - self.real.detach())
        return self.network.runner.weights(self.network.weights * bits)

    def mask(self) -> Tensor:
        return self.real.detach() > self.threshold

    def _learned(self) -> list[Tensor]:
        return [self.real]

    def fixed(self) -> OwnSubnetwork:
        """The task with the mask as it is now."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self.real.device)
        weights = self.network.weights[nothing]
        return OwnSubnetwork(self.network, self.task, self.classes, self.own, self.mask(), nothing, weights)


class WinningSubnetwork(ScoredSubnetwork):
    """The mask is where |scores| are largest; weights that no task uses yet are learned together with the scores.

    A score's gradient is sign(s) · w · dL/d(w⊙m), a free weight's m · dL/d(w⊙m).
    """

    def __init__(self, network: MaskedNetwork, task: str, classes: int, scores: Tensor) -> None:
        super().__init__(network, task, classes, scores)
        self.index = (~network.bank.used).nonzero().view(-1)
        self.values = network.weights[self.index].requires_grad_()

    def weights(self) -> Weights:
        return self._select(self.scores, self.network.weights.index_put((self.index,), self.values))

    def _learned(self) -> list[Tensor]:
        return [self.scores, self.values]

    def fixed(self) -> OwnSubnetwork:
        """The task with the mask as it is now, and the values of the free weights in it."""
        mask = self.mask()
        chosen = mask[self.index]
        index, values = self.index[chosen], self.values[chosen]
        return OwnSubnetwork(self.network, self.task, self.classes, self.own, mask, index, values)
