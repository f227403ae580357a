"""Subnetworks of the methods that give a task weights of its own: PackNet, Piggyback, winning subnetworks.

Like those of `subnetwork.py` they hold the weights of earlier tasks outside `parameters()`, and end in an
`OwnSubnetwork`, which a task is committed from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet.core.layout import Layout
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import masked_weights
from exssnet.core.subnetwork import OwnSubnetwork, ScoredSubnetwork, Subnetwork
from exssnet.engine.cpu.selection_cpu import CpuSelector


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

    def arranged(self) -> Tensor:
        # the difference is zero, and carries the gradient past the threshold: dL/dr = dL/d(w·m) · w
        bits = self.mask().to(self.real.dtype) + (self.real - self.real.detach())
        return self.network.arrangement(self.network.weights * bits)

    def mask(self) -> Tensor:
        return self.real.detach() > self.threshold

    def _learned(self) -> Tensor:
        return self.real

    def fixed(self) -> OwnSubnetwork:
        """The task with the mask as it is now."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self.real.device)
        weights = self.network.weights[nothing]
        return OwnSubnetwork(self.network, self.task, self.classes, self.own, self.mask(), nothing, weights)


class WinningSubnetwork(ScoredSubnetwork):
    """The mask is where |scores| are largest; weights that no task uses yet are learned together with the scores."""

    def __init__(self, network: MaskedNetwork, task: str, classes: int, scores: Tensor) -> None:
        super().__init__(network, task, classes, scores)
        self.index = (~network.bank.used).nonzero().view(-1)
        self.values = network.weights[self.index].requires_grad_()
        self._ones = torch.ones_like(network.weights)

    def arranged(self) -> Tensor:
        """w ⊙ m, where the selection from weights of one is m itself, with the gradient past it: dL/dm · sign(s).

        So plain autograd gives sign(s) · w · dL/d(w⊙m) to every score, and m · dL/d(w⊙m) to the free weights.
        """
        net, selector = self.network, self._selector
        weights = net.weights.index_put((self.index,), self.values)
        if selector is None:
            return net.arrangement(weights * masked_weights(self.scores, self._ones, net.layout, net.keep))
        if isinstance(selector, CpuSelector):
            return net.arrangement(weights * selector.masked_weights(self.scores, self._ones))
        return net.arrangement(weights) * selector.masked_weights(self.scores, self._ones, weights.dtype)

    def layers(self) -> dict[str, Tensor]:
        return self.network.layers(self.arranged())  # the short cut of phase 1 is for weights that stay

    def parameters(self) -> list[Tensor]:
        scores, *own = super().parameters()
        return [scores, *([self.values] if self.values.numel() else []), *own]

    def fixed(self) -> OwnSubnetwork:
        """The task with the mask as it is now, and the values of the free weights in it."""
        mask = self.mask()
        chosen = mask[self.index]
        index, values = self.index[chosen], self.values[chosen]
        return OwnSubnetwork(self.network, self.task, self.classes, self.own, mask, index, values)
