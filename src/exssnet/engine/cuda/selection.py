"""Exact selection for all layers at once on a GPU, in two launches, whatever the number of layers.

|s| is compared as an integer: the bits of a positive float are ordered like the float. Between two steps a layer's
threshold moves little and steadily, so it is expected in a narrow band. The first pass writes the weights of the scores
above the band, and zeros for all others; it counts those above and lists those in the band. The second has one program
for each layer. It finds the threshold among the few that are listed and writes the weights that belong to them; of
scores that are equal the first win. The counts prove the answer exact. Where they do not, because the threshold is not
in the band or the list is too short for it, the program searches among all scores of its layer by bisection, which is
always exact. Nothing depends on a look at the values from the host, so all of it can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from exssnet.core.layout import Layout
from exssnet.engine.cuda import streams
from exssnet.engine.cuda.kernels import jit, launch

BLOCK = 1024  # scores that a program of the first pass reads
LONG = 8192  # scores that the one program of a layer reads at a time, where it searches among all scores of the layer
FEW = tl.constexpr(1024)  # most lists are not longer
SHARE, LEAST, MOST = 64, 1024, 16384  # they have room for one in 64 scores of the largest layer, within bounds
FIRST = 0.005  # half a band's width, as a share of the threshold
NARROWEST, WIDEST = tl.constexpr(0.0005), tl.constexpr(0.5)
LARGEST = tl.constexpr(0x7FFFFFFF)


@jit
def _keys(scores: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Bits of |s|: non-negative, ordered like |s|; −1 where there is no score."""
    values = tl.load(scores + at, mask=inside, other=0.0)
    return tl.where(inside, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)


@jit
def _count(chosen: tl.tensor) -> tl.tensor:
    return tl.sum(chosen.to(tl.int32), 0)


@jit
def _pass(
    scores: tl.tensor, weights: tl.tensor, out: tl.tensor, positions: tl.tensor, segments: tl.tensor, starts: tl.tensor,
    stops: tl.tensor, bands: tl.tensor, counts: tl.tensor, near: tl.tensor, BLOCK: tl.constexpr, ROOM: tl.constexpr,
) -> None:  # fmt: skip
    """Write the weights above the band, zeros for the others; count those above, list those in the band."""
    block = tl.program_id(0)
    segment, start = tl.load(segments + block), tl.load(starts + block)
    at = start + tl.arange(0, BLOCK)
    inside = at < tl.load(stops + block)
    keys = _keys(scores, at, inside)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    position = tl.load(positions + at, mask=inside, other=0)
    low, high = tl.load(bands + 2 * segment), tl.load(bands + 2 * segment + 1)
    above = keys > high
    listed = (keys > low) & (keys <= high)
    tl.store(out + position, tl.where(above, weight, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.atomic_add(counts + 2 * segment, _count(above), sem="relaxed")
    here = _count(listed)
    if here > 0:
        before = tl.atomic_add(counts + 2 * segment + 1, here, sem="relaxed")
        slot = before + tl.cumsum(listed.to(tl.int32), 0) - 1
        free = near + 2 * segment * ROOM + slot
        tl.store(free, at, mask=listed & (slot < ROOM))
        tl.store(free + ROOM, keys, mask=listed & (slot < ROOM))


@jit
def _largest(values: tl.tensor, wanted: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The largest number in low..high that at least `wanted` values reach; they reach the lowest.

    Three numbers between are tried at a time, and counted in one sum.
    """
    while low < high:
        span = high - low - 1
        one, two, three = low + 1 + span // 4, low + 1 + span // 2, low + 1 + span - span // 4
        reached = (values >= one).to(tl.int64) + ((values >= two).to(tl.int64) << 21)
        counts = tl.sum(reached + ((values >= three).to(tl.int64) << 42), 0)
        first = (counts & 0x1FFFFF) >= wanted
        second = (counts >> 21 & 0x1FFFFF) >= wanted
        third = (counts >> 42) >= wanted
        high = tl.where(third, high, tl.where(second, three, tl.where(first, two, one)) - 1)
        low = tl.where(third, three, tl.where(second, two, tl.where(first, one, low)))
    return low


@jit
def _from_the_list(
    weights: tl.tensor, out: tl.tensor, positions: tl.tensor, near: tl.tensor, listed: tl.tensor, wanted: tl.tensor,
    low: tl.tensor, high: tl.tensor, LENGTH: tl.constexpr, ROOM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write the weights of the `wanted` largest scores in the list, of which `LENGTH` are read; the threshold."""
    slot = tl.arange(0, LENGTH)
    at = tl.load(near + slot, mask=slot < listed, other=0)
    keys = tl.load(near + ROOM + slot, mask=slot < listed, other=-1)
    values = tl.load(weights + at, mask=slot < listed, other=0.0)
    position = tl.load(positions + at, mask=slot < listed, other=0)
    threshold = _largest(keys, wanted, low + 1, high + 1)
    equal = keys == threshold
    take = wanted - _count(keys > threshold)
    chosen = keys >= threshold
    if _count(equal) > take:
        order = tl.where(equal, LARGEST - at, -1)  # the first is the largest
        chosen = (keys > threshold) | (equal & (order >= _largest(order, take, take * 0, take * 0 + LARGEST)))
    tl.store(out + position, values.to(out.dtype.element_ty), mask=chosen)
    return threshold


@jit
def _among_all(
    scores: tl.tensor, weights: tl.tensor, out: tl.tensor, positions: tl.tensor, start: tl.tensor, stop: tl.tensor,
    wanted: tl.tensor, LONG: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Do a whole layer: bisect the threshold, then write; the first of equal scores win."""
    low = wanted * 0  # the largest value that at least `wanted` scores reach lies in low..high
    high = low + LARGEST
    while low < high:
        middle = low + (high - low) // 2 + 1
        count = wanted * 0
        begin = start
        while begin < stop:
            at = begin + tl.arange(0, LONG)
            count += _count(_keys(scores, at, at < stop) >= middle)
            begin += LONG
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count >= wanted, high, middle - 1)
    larger = wanted * 0
    begin = start
    while begin < stop:
        at = begin + tl.arange(0, LONG)
        larger += _count(_keys(scores, at, at < stop) > low)
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
        position = tl.load(positions + at, mask=inside, other=0)
        tl.store(out + position, values.to(out.dtype.element_ty), mask=inside)
        equals -= tl.sum(equal, 0)
        begin += LONG
    return low


@jit
def _settle(
    scores: tl.tensor, weights: tl.tensor, out: tl.tensor, positions: tl.tensor, bounds: tl.tensor, keep: tl.tensor,
    bands: tl.tensor, track: tl.tensor, counts: tl.tensor, near: tl.tensor, misses: tl.tensor, ROOM: tl.constexpr,
    LONG: tl.constexpr,
) -> None:  # fmt: skip
    """Finish a layer, and say where its threshold is expected next: moved as far as it was now, unless it jumped.

    Bands may be anything, the masks stay exact. A band is a few times as wide as the last error, if the list has room.
    """
    layer = tl.program_id(0)
    start, stop, kept = tl.load(bounds + layer), tl.load(bounds + layer + 1), tl.load(keep + layer)
    low, high = tl.load(bands + 2 * layer), tl.load(bands + 2 * layer + 1)
    wanted, listed = kept - tl.load(counts + 2 * layer), tl.load(counts + 2 * layer + 1)
    last, move, width = tl.load(track + 3 * layer), tl.load(track + 3 * layer + 1), tl.load(track + 3 * layer + 2)
    known = (wanted >= 0) & (wanted <= listed) & (listed <= ROOM)
    threshold = wanted * 0
    listing = near + 2 * layer * ROOM
    if known & (listed <= FEW):
        threshold = _from_the_list(weights, out, positions, listing, listed, wanted, low, high, FEW, ROOM)
    elif known:
        threshold = _from_the_list(weights, out, positions, listing, listed, wanted, low, high, ROOM, ROOM)
    else:
        threshold = _among_all(scores, weights, out, positions, start, stop, kept, LONG)
        tl.store(misses + layer, tl.load(misses + layer) + 1)
    now = threshold.to(tl.float32, bitcast=True)
    error = tl.abs(now / (last + move) - 1)
    wider = tl.minimum(tl.maximum(tl.maximum(4 * error, 0.95 * width), NARROWEST), WIDEST)
    fitting = width * (ROOM // 2) / tl.maximum(listed, 1)
    width = tl.minimum(tl.where(error < WIDEST, wider, width), tl.maximum(fitting, NARROWEST / 16))
    move = tl.where(error < WIDEST, now - last, 0.0)
    next_low = ((now + move) * (1 - width)).to(tl.int32, bitcast=True) - 1
    next_high = ((now + move) * (1 + width)).to(tl.int32, bitcast=True)
    next_low = tl.minimum(tl.maximum(next_low, -1), LARGEST - 1)
    next_high = tl.minimum(tl.maximum(next_high, next_low), LARGEST - 1)
    all_of_them = kept == stop - start  # then the threshold does not matter: all are above −1
    tl.store(bands + 2 * layer, tl.where(all_of_them, -1, next_low))
    tl.store(bands + 2 * layer + 1, tl.where(all_of_them, -1, next_high))
    tl.store(track + 3 * layer, now)
    tl.store(track + 3 * layer + 1, move)
    tl.store(track + 3 * layer + 2, width)
    tl.store(counts + 2 * layer, 0)
    tl.store(counts + 2 * layer + 1, 0)


@jit
def _gradient(
    scores: tl.tensor, weights: tl.tensor, inflow: tl.tensor, positions: tl.tensor, out: tl.tensor, size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """ds = sign(s) · w · dL/d(w⊙m), with the inflow in the order in which the weights were written."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    s = tl.load(scores + at, mask=inside, other=0.0)
    w = tl.load(weights + at, mask=inside, other=0.0)
    g = tl.load(inflow + tl.load(positions + at, mask=inside, other=0), mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(s > 0, 1.0, tl.where(s < 0, -1.0, 0.0))
    tl.store(out + at, g * w * sign, mask=inside)


class CudaSelection:
    """What the passes know of the layers, kept on the device between steps."""

    def __init__(self, layout: Layout, keep: tuple[int, ...], positions: Tensor, size: int) -> None:
        device, layers = positions.device, layout.layers
        blocks = [
            (number, start, layer.stop)
            for number, layer in enumerate(layers)
            for start in range(layer.start, layer.stop, BLOCK)
        ]
        self._blocks = tuple(
            torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*blocks, strict=True)
        )
        self._bounds = torch.tensor([0, *(layer.stop for layer in layers)], dtype=torch.int32, device=device)
        self._keep = torch.tensor(keep, dtype=torch.int32, device=device)
        self.positions = positions  # int32 [n]: where each weight is written
        self.size = size  # of what is written to; where no weight goes stays zero
        self._written: dict[torch.dtype, Tensor] = {}
        self._room = min(max(triton.next_power_of_2(max(layer.size for layer in layers) // SHARE), LEAST), MOST)
        nowhere = [LARGEST.value] * (2 * len(layers))
        self._bands = torch.tensor(nowhere, dtype=torch.int32, device=device)  # [layers · 2]: of |s| as bits
        self._track = torch.tensor([0.0, 0.0, FIRST] * len(layers), device=device)  # last threshold, its move, width
        self._counts = torch.zeros(2 * len(layers), dtype=torch.int32, device=device)  # above the band, in it
        self._near = torch.zeros(2 * self._room * len(layers), dtype=torch.int32, device=device)
        self.misses = torch.zeros(len(layers), dtype=torch.int32, device=device)  # how often all scores were searched

    def write(self, scores: Tensor, weights: Tensor, out: Tensor) -> None:
        """Put the weights under the scores' mask into `out`, at their positions, zeros elsewhere."""
        tensors, room = (scores, weights, out, self.positions), self._room
        blocks, layers = len(self._blocks[0]), len(self._keep)
        launch(
            _pass, (blocks,), *tensors, *self._blocks, self._bands, self._counts, self._near, BLOCK=BLOCK, ROOM=room,
            num_warps=4,
        )  # fmt: skip
        launch(
            _settle, (layers,), *tensors, self._bounds, self._keep, self._bands, self._track, self._counts, self._near,
            self.misses, ROOM=room, LONG=LONG, num_warps=8,
        )  # fmt: skip

    def masked_weights(self, scores: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights under the scores' mask, at their positions; differentiable in the scores.

        In a captured step they are made from its beginning on: neither tensor may be a result of the same step.
        """
        if dtype not in self._written:
            self._written[dtype] = torch.zeros(self.size, dtype=dtype, device=weights.device)
        masked: Tensor = _StraightThrough.apply(scores, weights, self, self._written[dtype])  # type: ignore[no-untyped-call]
        return masked

    def gradient(self, scores: Tensor, weights: Tensor, inflow: Tensor) -> Tensor:
        out = torch.empty_like(scores)
        grid = (triton.cdiv(len(scores), BLOCK),)
        launch(_gradient, grid, scores, weights, inflow.contiguous(), self.positions, out, len(scores), BLOCK=BLOCK)
        return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, selection: CudaSelection, written: Tensor) -> Tensor:
        ctx.save_for_backward(scores, weights)
        ctx.selection = selection
        with streams.early():
            selection.write(scores, weights, written)
        return written.detach()  # the same memory in every step: each step writes every weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.selection.gradient(*ctx.saved_tensors, gradients[0]), None, None, None
