"""Exact top-k masks per layer, and the gradient that goes straight through the selection (edge-popup)."""

from __future__ import annotations

from decimal import ROUND_UP, Context, Decimal
from fractions import Fraction
from math import floor
from typing import Any

import torch
from torch import Tensor

from exssnet.core.layout import Layout
from exssnet.errors import InputError


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
    threshold = magnitude.topk(count, sorted=False).values.min()
    return first_of_equals(magnitude, threshold, count)


def first_of_equals(magnitude: Tensor, threshold: Tensor, count: int) -> Tensor:
    """The mask of the `count` largest, where of those equal to the threshold only the first may fit in."""
    above = magnitude > threshold
    equal = magnitude == threshold
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def keep_only(weights: Tensor, mask: Tensor) -> Tensor:
    """w ⊙ m with plain zeros outside the mask: a product leaves −0.0 there, which a digest would tell apart."""
    return torch.where(mask, weights, torch.zeros((), dtype=weights.dtype, device=weights.device))


def masked_weights(scores: Tensor, weights: Tensor, layout: Layout, keep: tuple[int, ...]) -> Tensor:
    """The effective weights under the scores' mask, differentiable in the scores."""
    effective: Tensor = _StraightThrough.apply(scores, weights, select(scores, layout, keep))  # type: ignore[no-untyped-call]
    return effective


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
