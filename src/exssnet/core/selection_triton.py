"""Exact selection for all layers at once on a GPU, in four launches, whatever the number of layers.

|s| is compared as an integer: the bits of a positive float are ordered like the float. Between two steps a layer's
threshold moves little, so the first pass counts only the scores near the last one, in 2,048 bins, and how many lie
above; the second counts the bin that holds the new threshold value by value; the third knows the threshold and writes
the weights under the mask. The counts prove the answer exact. The fourth pass does the rest: where several scores equal
the threshold and not all are wanted, it gives the places to the first of them; where the threshold left the window, it
does the layer anew by bisection, which is exact always. Nothing depends on a look at the values from the host, so all
of it can be captured in a graph.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.core.jit_triton import jit, launch
from exssnet.core.layout import Layout

BLOCK = 2048  # scores that a program reads
LONG = 8192  # scores that the one program of a layer reads at a time, where it does the layer anew
BINS = tl.constexpr(2048)  # of both counting passes; at least 2^SHIFT
SHIFT = tl.constexpr(9)  # a bin of the first pass holds 2^9 values: the window is 3 to 6 % of the threshold each way
LARGEST = tl.constexpr(0x7FFFFFFF)
DONE, TIED, UNKNOWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what the third pass leaves of a layer


@jit
def _keys(scores: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Bits of |s|: non-negative, ordered like |s|; −1 outside the layer."""
    values = tl.load(scores + at, mask=inside, other=0.0)
    return tl.where(inside, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)


@jit
def _place(
    block: tl.tensor, segments: tl.tensor, starts: tl.tensor, stops: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """A program's layer, the weights it looks at, and which of them belong to the layer."""
    at = tl.load(starts + block) + tl.arange(0, BLOCK)
    return tl.load(segments + block), at, at < tl.load(stops + block)


@jit
def _is_first(block: tl.tensor, segment: tl.tensor, segments: tl.tensor) -> tl.tensor:
    """Whether this program is its layer's first: the one that writes what holds for the whole layer."""
    return (block == 0) | (tl.load(segments + block - 1, mask=block > 0, other=-1) != segment)


@jit
def _bin(counts: tl.tensor, segment: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """The bin of the wanted-th largest that was counted, how many of that bin are wanted, how many are in it.

    The bin is −1 if fewer were counted than are wanted, and all of them if none is: then nothing is known.
    """
    bin = tl.arange(0, BINS)
    count = tl.load(counts + segment * BINS + bin)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # in this bin or a larger one
    found = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    larger = tl.sum(tl.where(bin > found, count, 0), 0)
    there = tl.sum(tl.where(bin == found, count, 0), 0)
    return found, wanted - larger, there


@jit
def _near(
    scores: tl.tensor, segments: tl.tensor, starts: tl.tensor, stops: tl.tensor, thresholds: tl.tensor,
    above: tl.tensor, coarse: tl.tensor, fine: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Count the scores near the last threshold in bins, and those above them; clear the other pass's counts."""
    block = tl.program_id(0)
    segment, at, inside = _place(block, segments, starts, stops, BLOCK)
    keys = _keys(scores, at, inside)
    low = tl.maximum(tl.load(thresholds + segment) - (BINS << SHIFT) // 2, 0)
    bin = (keys - low) >> SHIFT
    tl.atomic_add(coarse + segment * BINS + bin, 1, mask=(keys >= low) & (bin < BINS))
    tl.atomic_add(above + segment, tl.sum((inside & (keys >= low) & (bin >= BINS)).to(tl.int32), 0))
    if _is_first(block, segment, segments):
        tl.store(fine + segment * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))


@jit
def _exact(
    scores: tl.tensor, segments: tl.tensor, starts: tl.tensor, stops: tl.tensor, thresholds: tl.tensor,
    keep: tl.tensor, above: tl.tensor, coarse: tl.tensor, fine: tl.tensor, state: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Find the bin of the new threshold; count its scores value by value."""
    block = tl.program_id(0)
    segment, at, inside = _place(block, segments, starts, stops, BLOCK)
    low = tl.maximum(tl.load(thresholds + segment) - (BINS << SHIFT) // 2, 0)
    missing = tl.load(keep + segment) - tl.load(above + segment)
    found, wanted, _ = _bin(coarse, segment, missing)
    known = (missing > 0) & (found >= 0)
    base = low + (found << SHIFT)
    value = tl.where(known, _keys(scores, at, inside) - base, -1)
    tl.atomic_add(fine + segment * BINS + value, 1, mask=inside & (value >> SHIFT == 0))
    if _is_first(block, segment, segments):
        tl.store(state + 2 * segment, tl.where(known, base, -1))
        tl.store(state + 2 * segment + 1, wanted)


@jit
def _write(
    scores: tl.tensor, weights: tl.tensor, out: tl.tensor, places: tl.tensor, segments: tl.tensor, starts: tl.tensor,
    stops: tl.tensor, fine: tl.tensor, state: tl.tensor, thresholds: tl.tensor, left: tl.tensor, take: tl.tensor,
    equals: tl.tensor, above: tl.tensor, coarse: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the weights above the threshold and, if all are wanted, at it; zeros for the others; say what is left."""
    block = tl.program_id(0)
    segment, at, inside = _place(block, segments, starts, stops, BLOCK)
    base = tl.load(state + 2 * segment)
    value, wanted, there = _bin(fine, segment, tl.load(state + 2 * segment + 1))
    threshold = base + value
    tied = wanted != there
    keys = _keys(scores, at, inside)
    chosen = (keys > threshold) | ((keys == threshold) & (tied == 0))
    values = tl.where(chosen, tl.load(weights + at, mask=inside, other=0.0), 0.0)
    place = tl.load(places + at, mask=inside, other=0)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=tl.where(inside, base, -1) >= 0)
    tl.store(equals + block, tl.sum((keys == threshold).to(tl.int32), 0))
    if _is_first(block, segment, segments):
        tl.store(left + segment, tl.where(base >= 0, tl.where(tied, TIED, DONE), UNKNOWN))
        tl.store(take + segment, wanted)
        tl.store(above + segment, 0)
        tl.store(coarse + segment * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        if base >= 0:
            tl.store(thresholds + segment, threshold)


@jit
def _finish(
    scores: tl.tensor, weights: tl.tensor, out: tl.tensor, places: tl.tensor, segments: tl.tensor, starts: tl.tensor,
    stops: tl.tensor, bounds: tl.tensor, first: tl.tensor, keep: tl.tensor, left: tl.tensor, take: tl.tensor,
    equals: tl.tensor, thresholds: tl.tensor, BLOCK: tl.constexpr, LONG: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    """Do what the third pass left: share out the places among equals, or do a layer anew."""
    block = tl.program_id(0)
    segment, at, inside = _place(block, segments, starts, stops, BLOCK)
    todo = tl.load(left + segment)
    if todo == TIED:
        here = tl.load(equals + block)
        if here > 0:
            before = tl.load(first + segment) + tl.arange(0, MOST)  # the layer's blocks before this one
            earlier = tl.sum(tl.load(equals + before, mask=before < block, other=0), 0)
            equal = _keys(scores, at, inside) == tl.load(thresholds + segment)
            chosen = equal & (earlier + tl.cumsum(equal.to(tl.int32), 0) <= tl.load(take + segment))
            values = tl.load(weights + at, mask=chosen, other=0.0)
            place = tl.load(places + at, mask=chosen, other=0)
            tl.store(out + place, values.to(out.dtype.element_ty), mask=chosen)
    elif (todo == UNKNOWN) & _is_first(block, segment, segments):
        start, stop = tl.load(bounds + segment), tl.load(bounds + segment + 1)
        _do_anew(scores, weights, out, places, start, stop, tl.load(keep + segment), thresholds + segment, LONG)


@jit
def _do_anew(
    scores: tl.tensor, weights: tl.tensor, out: tl.tensor, places: tl.tensor, start: tl.tensor, stop: tl.tensor,
    wanted: tl.tensor, threshold: tl.tensor, LONG: tl.constexpr,
) -> None:  # fmt: skip
    """One program does a whole layer: bisect the threshold, then write; the first of equal scores win."""
    low = wanted * 0  # the largest value that at least `wanted` scores reach lies in low..high
    high = low + LARGEST
    while low < high:
        middle = low + (high - low) // 2 + 1
        count = wanted * 0
        begin = start
        while begin < stop:
            at = begin + tl.arange(0, LONG)
            count += tl.sum((_keys(scores, at, at < stop) >= middle).to(tl.int32), 0)
            begin += LONG
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count >= wanted, high, middle - 1)
    larger = wanted * 0
    begin = start
    while begin < stop:
        at = begin + tl.arange(0, LONG)
        larger += tl.sum((_keys(scores, at, at < stop) > low).to(tl.int32), 0)
        begin += LONG
    equals = wanted - larger
    begin = start
    while begin < stop:
        at = begin + tl.arange(0, LONG)
        inside = at < stop
        keys = _keys(scores, at, inside)
        equal = (keys == low).to(tl.int32)
        chosen = (keys > low) | ((equal > 0) & (tl.cumsum(equal, 0) <= equals))
        values = tl.where(chosen, tl.load(weights + at, mask=inside, other=0.0), 0.0)
        place = tl.load(places + at, mask=inside, other=0)
        tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)
        equals -= tl.sum(equal, 0)
        begin += LONG
    tl.store(threshold, low)


@jit
def _gradient(
    scores: tl.tensor, weights: tl.tensor, inflow: tl.tensor, places: tl.tensor, out: tl.tensor, size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """ds = sign(s) · w · dL/d(w⊙m), with the inflow in the order in which the weights were written."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    s = tl.load(scores + at, mask=inside, other=0.0)
    w = tl.load(weights + at, mask=inside, other=0.0)
    g = tl.load(inflow + tl.load(places + at, mask=inside, other=0), mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(s > 0, 1.0, tl.where(s < 0, -1.0, 0.0))
    tl.store(out + at, g * w * sign, mask=inside)


class TritonSelector:
    """The layers' blocks and the counters of the passes, kept on the device between steps."""

    def __init__(self, layout: Layout, keep: tuple[int, ...], places: Tensor, size: int) -> None:
        device = places.device
        blocks = [
            (number, start, layer.stop)
            for number, layer in enumerate(layout.layers)
            for start in range(layer.start, layer.stop, BLOCK)
        ]
        self.segments, self.starts, self.stops = (
            torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*blocks, strict=True)
        )
        self.grid = (len(blocks),)
        self.layers = len(layout.layers)
        self.bounds = torch.tensor([0, *(layer.stop for layer in layout.layers)], dtype=torch.int32, device=device)
        counts = [-(-layer.size // BLOCK) for layer in layout.layers]
        self.first = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)  # block of each layer
        self.most = triton.next_power_of_2(max(counts))
        self.equals = torch.zeros(len(blocks), dtype=torch.int32, device=device)
        self.keep = torch.tensor(keep, dtype=torch.int32, device=device)
        self.places = places  # int32 [n]: where each weight is written
        self.size = size  # of what is written to; where no weight goes stays zero
        self._written: dict[torch.dtype, Tensor] = {}
        self.coarse, self.fine = self._counters(BINS.value), self._counters(BINS.value)
        self.above, self.left, self.take, self.state = (self._counters(each) for each in (1, 1, 1, 2))
        self.thresholds = self._counters(1)  # of the step before, as bits of |s|

    def _counters(self, each: int) -> Tensor:
        return torch.zeros(self.layers * each, dtype=torch.int32, device=self.keep.device)

    def write(self, scores: Tensor, weights: Tensor, out: Tensor) -> None:
        """Put the weights under the scores' mask into `out`, at their places, zeros elsewhere."""
        blocks = (self.segments, self.starts, self.stops)
        counts = (self.above, self.coarse, self.fine)
        launch(_near, self.grid, scores, *blocks, self.thresholds, *counts, BLOCK=BLOCK)
        launch(_exact, self.grid, scores, *blocks, self.thresholds, self.keep, *counts, self.state, BLOCK=BLOCK)
        launch(
            _write, self.grid, scores, weights, out, self.places, *blocks, self.fine, self.state, self.thresholds,
            self.left, self.take, self.equals, self.above, self.coarse, BLOCK=BLOCK,
        )  # fmt: skip
        launch(
            _finish, self.grid, scores, weights, out, self.places, *blocks, self.bounds, self.first, self.keep,
            self.left, self.take, self.equals, self.thresholds, BLOCK=BLOCK, LONG=LONG, MOST=self.most, num_warps=16,
        )  # fmt: skip

    def masked_weights(self, scores: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights under the scores' mask, at their places; differentiable in the scores."""
        if dtype not in self._written:
            self._written[dtype] = torch.zeros(self.size, dtype=dtype, device=weights.device)
        masked: Tensor = _StraightThrough.apply(scores, weights, self, self._written[dtype])  # type: ignore[no-untyped-call]
        return masked

    def gradient(self, scores: Tensor, weights: Tensor, inflow: Tensor) -> Tensor:
        out = torch.empty_like(scores)
        grid = (triton.cdiv(len(scores), BLOCK),)
        launch(_gradient, grid, scores, weights, inflow.contiguous(), self.places, out, len(scores), BLOCK=BLOCK)
        return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, selector: TritonSelector, written: Tensor) -> Tensor:
        ctx.save_for_backward(scores, weights)
        ctx.selector = selector
        selector.write(scores, weights, written)
        return written.detach()  # the same memory in every step: each step writes every weight anew

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.selector.gradient(*ctx.saved_tensors, gradients[0]), None, None, None
