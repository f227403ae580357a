"""Exact selection for all layers at once on a GPU: a radix select in five launches, whatever the number of layers.

|s| as an integer (the bits of a positive float are ordered like the float) is cut into digits of 11, 10 and 10 bits.
Each pass counts the digits of the scores that are still candidates, per layer; the next pass reads the counts, knows
the digit of the layer's threshold, and goes on with the scores that share it. The last pass knows the threshold itself
and writes the weights under the mask. Nothing depends on a look at the values from the host, so the passes can be
captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.core.layout import Layout

jit: Callable[[Callable[..., Any]], Any] = triton.jit
BLOCK = 8192  # scores a program reads: fewer programs add to the counts, and each knows the threshold for more
WIDE, NARROW = tl.constexpr(2048), tl.constexpr(1024)  # bins of the first and of the other two passes


@jit
def _keys(scores: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Bits of |s|: non-negative, ordered like |s|."""
    values = tl.load(scores + at, mask=inside, other=0.0)
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _digit(counts: tl.tensor, segment: tl.tensor, bins: tl.constexpr, wanted: tl.tensor) -> tl.tensor:
    """The digit of the wanted-th largest candidate, how many of that digit are wanted, how many there are."""
    bin = tl.arange(0, bins)
    count = tl.load(counts + segment * bins + bin)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # candidates with this digit or a larger one
    digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    larger = tl.sum(tl.where(bin > digit, count, 0), 0)
    there = tl.sum(tl.where(bin == digit, count, 0), 0)
    return digit, wanted - larger, there


@jit
def _first(
    scores: tl.tensor,
    segments: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    counts: tl.tensor,
    spent: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Count the top digits; make the third pass's counts zero again."""
    block = tl.program_id(0)
    segment, start, stop = tl.load(segments + block), tl.load(starts + block), tl.load(stops + block)
    at = start + tl.arange(0, BLOCK)
    inside = at < stop
    digits = _keys(scores, at, inside) >> 20
    found = tl.histogram(digits, WIDE, mask=inside)
    bin = tl.arange(0, WIDE)
    tl.atomic_add(counts + segment * WIDE + bin, found, mask=found > 0)
    _clear(spent, segments, block, segment, NARROW)


@jit
def _second(
    scores: tl.tensor,
    segments: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    keep: tl.tensor,
    top: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Find each layer's top digit; count the next digit of the scores that have it."""
    block = tl.program_id(0)
    segment, start, stop = tl.load(segments + block), tl.load(starts + block), tl.load(stops + block)
    digit, wanted, _ = _digit(top, segment, WIDE, tl.load(keep + segment))
    at = start + tl.arange(0, BLOCK)
    inside = at < stop
    keys = _keys(scores, at, inside)
    tl.atomic_add(counts + segment * NARROW + ((keys >> 10) & 1023), 1, mask=inside & (keys >> 20 == digit))
    if _is_first(segments, block, segment):
        tl.store(state + 2 * segment, digit)
        tl.store(state + 2 * segment + 1, wanted)


@jit
def _third(
    scores: tl.tensor,
    segments: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    middle: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    final: tl.tensor,
    spent: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Find the middle digit; count the last one; make the first pass's counts zero again."""
    block = tl.program_id(0)
    segment, start, stop = tl.load(segments + block), tl.load(starts + block), tl.load(stops + block)
    digit, wanted, _ = _digit(middle, segment, NARROW, tl.load(state + 2 * segment + 1))
    prefix = (tl.load(state + 2 * segment) << 10) | digit
    at = start + tl.arange(0, BLOCK)
    inside = at < stop
    keys = _keys(scores, at, inside)
    tl.atomic_add(counts + segment * NARROW + (keys & 1023), 1, mask=inside & (keys >> 10 == prefix))
    if _is_first(segments, block, segment):
        tl.store(final + 2 * segment, prefix)
        tl.store(final + 2 * segment + 1, wanted)
    _clear(spent, segments, block, segment, WIDE)


@jit
def _write(
    scores: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    segments: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    last: tl.tensor,
    final: tl.tensor,
    ties: tl.tensor,
    spent: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Know the threshold; write the weights above it, and those equal to it unless only some of them are wanted."""
    block = tl.program_id(0)
    segment, start, stop = tl.load(segments + block), tl.load(starts + block), tl.load(stops + block)
    digit, wanted, there = _digit(last, segment, NARROW, tl.load(final + 2 * segment + 1))
    threshold = (tl.load(final + 2 * segment) << 10) | digit
    at = start + tl.arange(0, BLOCK)
    inside = at < stop
    keys = _keys(scores, at, inside)
    chosen = (keys > threshold) | ((keys == threshold) & (wanted == there))
    values = tl.where(chosen, tl.load(weights + at, mask=inside, other=0.0), 0.0)
    tl.store(out + tl.load(places + at, mask=inside, other=0), values.to(out.dtype.element_ty), mask=inside)
    if _is_first(segments, block, segment):
        tl.store(ties + 2 * segment, threshold)
        tl.store(ties + 2 * segment + 1, tl.where(wanted == there, 0, wanted))
    _clear(spent, segments, block, segment, NARROW)


@jit
def _break_ties(
    scores: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    bounds: tl.tensor,
    ties: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Of the scores equal to the threshold, write the first so many; a layer without surplus has nothing to do."""
    segment = tl.program_id(0)
    threshold, wanted = tl.load(ties + 2 * segment), tl.load(ties + 2 * segment + 1)
    if wanted > 0:
        begin, stop = tl.load(bounds + segment), tl.load(bounds + segment + 1)
        while begin < stop:
            at = begin + tl.arange(0, BLOCK)
            inside = at < stop
            equal = ((_keys(scores, at, inside) == threshold) & inside).to(tl.int32)
            chosen = (equal > 0) & (tl.cumsum(equal, 0) <= wanted)
            values = tl.load(weights + at, mask=chosen, other=0.0)
            place = tl.load(places + at, mask=chosen, other=0)
            tl.store(out + place, values.to(out.dtype.element_ty), mask=chosen)
            wanted -= tl.sum(equal, 0)
            begin += BLOCK


@jit
def _gradient(
    scores: tl.tensor,
    weights: tl.tensor,
    inflow: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """ds = sign(s) · w · dL/d(w⊙m), with the inflow in the order in which the weights were written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    s = tl.load(scores + at, mask=inside, other=0.0)
    w = tl.load(weights + at, mask=inside, other=0.0)
    g = tl.load(inflow + tl.load(places + at, mask=inside, other=0), mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(s > 0, 1.0, tl.where(s < 0, -1.0, 0.0))
    tl.store(out + at, g * w * sign, mask=inside)


@jit
def _is_first(segments: tl.tensor, block: tl.tensor, segment: tl.tensor) -> tl.tensor:
    """Whether this block is its layer's first: the one that writes what holds for the whole layer."""
    return (block == 0) | (tl.load(segments + block - 1, mask=block > 0, other=-1) != segment)


@jit
def _clear(
    counts: tl.tensor, segments: tl.tensor, block: tl.tensor, segment: tl.tensor, bins: tl.constexpr
) -> tl.tensor:
    if _is_first(segments, block, segment):
        tl.store(counts + segment * bins + tl.arange(0, bins), tl.zeros([bins], tl.int32))


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
        self.keep = torch.tensor(keep, dtype=torch.int32, device=device)
        self.places = places  # int32 [n]: where each weight is written
        self.size = size  # of what is written to; where no weight goes stays zero
        self._written: dict[torch.dtype, Tensor] = {}
        self.top = torch.zeros(self.layers * 2048, dtype=torch.int32, device=device)
        self.middle, self.last = (torch.zeros(self.layers * 1024, dtype=torch.int32, device=device) for _ in range(2))
        self.state, self.final, self.ties = (
            torch.zeros(self.layers * 2, dtype=torch.int32, device=device) for _ in range(3)
        )

    def write(self, scores: Tensor, weights: Tensor, out: Tensor) -> None:
        """Put the weights under the scores' mask into `out`, at their places, zeros elsewhere."""
        blocks = (self.segments, self.starts, self.stops)
        _first[self.grid](scores, *blocks, self.top, self.last, BLOCK=BLOCK)
        _second[self.grid](scores, *blocks, self.keep, self.top, self.middle, self.state, BLOCK=BLOCK)
        _third[self.grid](scores, *blocks, self.middle, self.last, self.state, self.final, self.top, BLOCK=BLOCK)
        _write[self.grid](
            scores, weights, out, self.places, *blocks, self.last, self.final, self.ties, self.middle, BLOCK=BLOCK
        )
        _break_ties[(self.layers,)](scores, weights, out, self.places, self.bounds, self.ties, BLOCK=BLOCK)

    def masked_weights(self, scores: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights under the scores' mask, at their places; differentiable in the scores."""
        if dtype not in self._written:
            self._written[dtype] = torch.zeros(self.size, dtype=dtype, device=weights.device)
        masked: Tensor = _StraightThrough.apply(scores, weights, self, self._written[dtype])  # type: ignore[no-untyped-call]
        return masked

    def gradient(self, scores: Tensor, weights: Tensor, inflow: Tensor) -> Tensor:
        out = torch.empty_like(scores)
        grid = (triton.cdiv(len(scores), BLOCK),)
        _gradient[grid](scores, weights, inflow.contiguous(), self.places, out, len(scores), BLOCK=BLOCK)
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
