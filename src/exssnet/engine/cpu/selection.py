"""Exact selection step after step on a CPU, without a sort over all scores.

Between two steps a layer's threshold moves little. So one pass counts the scores above a narrow band around the last
one, and only those inside the band are put in order. The counts prove the new threshold exact; where they do not, it is
searched among all scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from exssnet.core.layout import Layout
from exssnet.engine.cpu.jit import jit

BLOCK = 64  # scores
FIRST, NARROWEST, WIDEST = 0.03, 0.002, 0.5  # half the band's width, as a share of the threshold

Numbers = NDArray[Any]


@jit
def _band(scores: Any, low: Any, high: Any, room: Any) -> tuple[int, int]:
    """How many |s| lie above the band, and how many in it; these go into `room`, which has one more position."""
    above = listed = 0
    whole = len(scores) // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        block = scores[start : start + BLOCK]
        higher = reached = 0
        for i in range(BLOCK):  # two plain loops, which the compiler turns into vector instructions
            higher += abs(block[i]) > high
        for i in range(BLOCK):
            reached += abs(block[i]) >= low
        above += higher
        if reached != higher:
            for i in range(BLOCK):
                magnitude = abs(block[i])
                room[listed] = magnitude
                listed += (magnitude >= low) & (magnitude <= high)
    for i in range(whole, len(scores)):
        magnitude = abs(scores[i])
        above += magnitude > high
        if low <= magnitude <= high:
            room[listed] = magnitude
            listed += 1
    return above, listed


@jit
def _write(scores: Any, weights: Any, keep: int, least: Any, out: Any) -> None:
    """The weights whose |s| reaches the threshold, zeros elsewhere; of equals the first."""
    reached = 0
    for i in range(len(scores)):
        inside = abs(scores[i]) >= least
        reached += inside
        out[i] = weights[i] if inside else 0
    if reached > keep:
        for i in range(len(scores) - 1, -1, -1):
            if reached > keep and abs(scores[i]) == least:
                out[i] = 0
                reached -= 1


@jit
def _gradient(inflow: Any, weights: Any, scores: Any, out: Any) -> None:
    """ds = dL/d(w⊙m) · w · sign(s)."""
    for i in range(len(scores)):
        sign = scores.dtype.type(scores[i] > 0) - scores.dtype.type(scores[i] < 0)
        out[i] = inflow[i] * weights[i] * sign


@dataclass
class _Layer:
    """Where a layer's threshold was last, and how far it may have moved."""

    start: int
    stop: int
    keep: int
    threshold: float = nan
    width: float = FIRST  # half the band's, as a share of the threshold

    def select(self, scores: Numbers, room: Numbers) -> Any:
        """The keep-th largest |s|."""
        last, number = self.threshold, scores.dtype.type
        low, high = number(last * (1 - self.width)), number(last * (1 + self.width))
        above, listed = _band(scores, low, high, room)
        position = listed - (self.keep - above)
        if 0 <= position < listed and above < self.keep:
            threshold = np.partition(room[:listed], position)[position]
        else:
            threshold = np.partition(np.abs(scores), len(scores) - self.keep)[len(scores) - self.keep]
        if last > 0:
            moved = abs(float(threshold) / last - 1)
            self.width = min(max(4 * moved, 0.9 * self.width, NARROWEST), WIDEST)
        self.threshold = float(threshold)
        return threshold


class CpuSelection:
    """The masks of one set of scores while it is learned."""

    def __init__(self, layout: Layout, keep: tuple[int, ...]) -> None:
        layers = zip(layout.layers, keep, strict=True)
        self._layers = [_Layer(layer.start, layer.stop, count) for layer, count in layers]
        self._longest = max(layer.size for layer in layout.layers)

    def __call__(self, scores: Tensor, weights: Tensor) -> Tensor:
        """The weights under the scores' mask; differentiable in the scores."""
        masked: Tensor = _StraightThrough.apply(scores, weights, self)  # type: ignore[no-untyped-call]
        return masked

    def masked(self, scores: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(weights)
        numbers, kept, written = scores.detach().numpy(), weights.numpy(), out.numpy()
        room = np.empty(self._longest + 1, numbers.dtype)
        for layer in self._layers:
            own = slice(layer.start, layer.stop)
            threshold = layer.select(numbers[own], room)
            _write(numbers[own], kept[own], layer.keep, threshold, written[own])
        return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, selection: CpuSelection) -> Tensor:
        ctx.save_for_backward(scores, weights)
        return selection.masked(scores, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        scores, weights = ctx.saved_tensors
        out = torch.empty_like(scores)
        _gradient(gradients[0].contiguous().numpy(), weights.numpy(), scores.detach().numpy(), out.numpy())
        return out, None, None
