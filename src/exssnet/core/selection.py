"""Exact top-k masks per layer, and the gradient that goes straight through the selection (edge-popup)."""

from __future__ import annotations

from decimal import ROUND_UP, Context, Decimal
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exssnet.core.layout import Layout
from exssnet.engine.kernels import has_kernels
from exssnet.errors import InputError

if TYPE_CHECKING:
    from exssnet.engine.cpu.selection_cpu import CpuSelector
    from exssnet.engine.cuda.selection_triton import TritonSelector
    from exssnet.engine.memory_format import Arrangement


def keep_counts(layout: Layout, density: float) -> tuple[int, ...]:
    """Ones per layer: n − ⌊(1−k)·n⌋, with k as the decimal it was written as."""
    if not isinstance(density, int | float) or not 0 < density <= 1:
        raise InputError(f"density is {density}: it must be above 0 and at most 1, for example 0.1")
    k = Fraction(str(density))
    for layer in layout.layers:
        if k * layer.size < 1:
            raise InputError(
                f"density {density} leaves layer {layer.name} ({layer.size} weights) without a weight: "
                f"use at least {_least_density(layout)}"
            )
    return tuple(layer.size - floor((1 - k) * layer.size) for layer in layout.layers)


def _least_density(layout: Layout) -> Decimal:
    """The smallest density of two digits that gives every layer a weight."""
    smallest = Decimal(min(layer.size for layer in layout.layers))
    return Context(prec=2, rounding=ROUND_UP).divide(Decimal(1), smallest)


def select(scores: Tensor, layout: Layout, keep: tuple[int, ...]) -> Tensor:
    """The mask (bool) with exactly keep[l] ones in layer l, at the largest |s|; ties go to the lower index."""
    magnitudes = layout.slices(scores.detach().abs())
    return torch.cat([_largest(m, count) for m, count in zip(magnitudes, keep, strict=True)])


def _largest(magnitude: Tensor, count: int) -> Tensor:
    if magnitude.is_cuda:  # without a look at the values, so that the step can be captured
        return first_of_equals(magnitude, magnitude.topk(count, sorted=False).values.min(), count)
    # numpy's partial sort is twice as fast as torch's kthvalue
    place = len(magnitude) - count
    threshold = float(np.partition(magnitude.numpy(), place)[place])
    mask = magnitude >= threshold
    if int(mask.count_nonzero()) != count:
        mask = first_of_equals(magnitude, torch.tensor(threshold, dtype=magnitude.dtype), count)
    return mask


def first_of_equals(magnitude: Tensor, threshold: Tensor, count: int) -> Tensor:
    """The mask of the largest, where of those equal to the threshold only the first may fit in."""
    above = magnitude > threshold
    equal = magnitude == threshold
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


class _StraightThrough(torch.autograd.Function):
    """w ⊙ m forward; ds = sign(s) · w · dL/d(w⊙m) backward, for every weight, also those masked out."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(scores, weights)
        return keep_only(weights, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        scores, weights = ctx.saved_tensors
        return gradients[0] * weights * scores.sign(), None, None


def keep_only(weights: Tensor, mask: Tensor) -> Tensor:
    """w ⊙ m with plain zeros outside the mask: a product leaves −0.0 there, which a digest would tell apart."""
    return torch.where(mask, weights, torch.zeros((), dtype=weights.dtype, device=weights.device))


def masked_weights(scores: Tensor, weights: Tensor, layout: Layout, keep: tuple[int, ...]) -> Tensor:
    """The effective weights under the scores' mask, differentiable in the scores."""
    effective: Tensor = _StraightThrough.apply(scores, weights, select(scores, layout, keep))  # type: ignore[no-untyped-call]
    return effective


def step_selector(
    arrangement: Arrangement, keep: tuple[int, ...], weights: Tensor
) -> CpuSelector | TritonSelector | None:
    """What selects fast in step after step for such weights; None where there is nothing of the kind."""
    if not weights.is_cuda:
        return _cpu_selector(arrangement, keep)
    if not has_kernels(weights, torch.float32):
        return None
    from exssnet.engine.cuda.selection_triton import TritonSelector

    return TritonSelector(arrangement.layout, keep, arrangement.places, arrangement.size)


def _cpu_selector(arrangement: Arrangement, keep: tuple[int, ...]) -> CpuSelector:
    from exssnet.engine.cpu.selection_cpu import BandSelector

    try:
        from exssnet.engine.cpu.selection_numba import CompiledSelector
    except ImportError:  # no numba, or one that does not fit this numpy
        return BandSelector(arrangement, keep)
    return CompiledSelector(arrangement, keep)
