"""Exact selection step after step on a CPU, without a sort over all scores.

Between two steps a layer's threshold moves little. So only the scores in a narrow band around the last one are looked
at: if so many lie above the band that the wanted rank falls inside it, the threshold is the band's own order statistic,
and the counts prove it exact. Where they do not, the layer is selected anew over all scores. numpy does the comparing:
on bools it is several times as fast as torch. Where numba can be imported, `selection_numba` takes the place of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exssnet.core.layout import Layer
from exssnet.core.selection import first_of_equals
from exssnet.engine.memory_format import Arrangement

NARROWEST, WIDEST = 0.002, 0.5  # half the band's width, as a share of the threshold

Floats = NDArray[Any]
Bools = NDArray[np.bool_]


@dataclass
class _Band:
    """Where a layer's threshold was last, and how far it may have moved."""

    layer: Layer
    keep: int
    threshold: float | None = None
    width: float = 0.03

    def select(self, magnitude: Floats) -> Bools:
        threshold = None if self.threshold is None else self._inside(magnitude, self.threshold)
        if threshold is None:
            place = len(magnitude) - self.keep
            threshold = float(np.partition(magnitude, place)[place])
        self._learn_from(threshold)
        mask: Bools = magnitude >= magnitude.dtype.type(threshold)
        if np.count_nonzero(mask) != self.keep:
            whole, value = torch.from_numpy(magnitude), torch.tensor(threshold, dtype=torch.float64)
            mask = first_of_equals(whole, value.to(whole.dtype), self.keep).numpy()
        return mask

    def _inside(self, magnitude: Floats, last: float) -> float | None:
        """The threshold, if it lies in the band around the last one."""
        low, high = (magnitude.dtype.type(last * share) for share in (1 - self.width, 1 + self.width))
        above = magnitude > high
        wanted = self.keep - int(np.count_nonzero(above))
        band = magnitude[np.flatnonzero(np.logical_xor(magnitude >= low, above))]
        if not 0 < wanted <= len(band):
            return None
        return float(np.partition(band, len(band) - wanted)[len(band) - wanted])

    def _learn_from(self, threshold: float) -> None:
        """Keep the band a few times as wide as the threshold's last move."""
        if self.threshold:
            moved = abs(threshold / self.threshold - 1)
            self.width = min(max(4 * moved, 0.9 * self.width, NARROWEST), WIDEST)
        self.threshold = threshold


class CpuSelector(ABC):
    """The masks of one set of scores while it is learned."""

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement, self.layout = arrangement, arrangement.layout

    @abstractmethod
    def masked_weights(self, scores: Tensor, weights: Tensor) -> Tensor:
        """The weights under the scores' mask, in the plain order, differentiable in the scores."""

    def masked_layers(self, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The same by layer, arranged to run."""
        return self.arrangement.tensors(self.arrangement(self.masked_weights(scores, weights)))


class BandSelector(CpuSelector):
    """What can be done without a compiler."""

    def __init__(self, arrangement: Arrangement, keep: tuple[int, ...]) -> None:
        super().__init__(arrangement)
        self._bands = [_Band(layer, count) for layer, count in zip(self.layout.layers, keep, strict=True)]

    def mask(self, scores: Tensor) -> Bools:
        """Exactly the layers' counts of ones, at the largest |s|; ties go to the lower index."""
        magnitude = np.abs(scores.detach().numpy())
        return np.concatenate([band.select(magnitude[band.layer.start : band.layer.stop]) for band in self._bands])

    def masked_weights(self, scores: Tensor, weights: Tensor) -> Tensor:
        masked: Tensor = _StraightThrough.apply(scores, weights, self)  # type: ignore[no-untyped-call]
        return masked


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, selector: BandSelector) -> Tensor:
        ctx.save_for_backward(scores, weights)
        masked = np.multiply(weights.numpy(), selector.mask(scores))
        masked += 0  # makes 0.0 of −0.0; a choice by the mask would take four times as long
        return torch.from_numpy(masked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        scores, weights = ctx.saved_tensors
        return (gradients[0] * weights).mul_(scores.sign()), None, None
