"""The selection of `selection_cpu`, compiled, and kept up to date instead of made anew.

From one step to the next few weights enter or leave a mask, and few scores change their sign. So the weights under the
mask are kept, and so is w·sign(s), which the gradient needs. A pass compares 64 scores at a time with zero and with the
ends of the band around the last threshold, and writes only where this differs from what the last pass saw. Then the few
scores inside the band are put in order. Counts prove the masks exact; a layer where they do not is selected anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import inf, isnan, nan, prod
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from exssnet.core.layout import Layout
from exssnet.core.selection_cpu import CpuSelector

NARROWEST, FIRST, WIDEST = 0.0005, 0.03, 0.5  # half the band's width, as a share of the threshold
WORD = 64  # bits
ONE = np.uint64(1)

Floats = NDArray[Any]
Shapes = Sequence[tuple[int, ...]]
inserted: Callable[[Callable[..., Any]], Any] = intrinsic  # code that is written for the compiler


def jit(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called, and kept for other processes."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder where what was compiled could be kept
        return numba.njit(error_model="numpy")(function)


def _comparison(operator: str, magnitude: bool) -> Any:
    """A word of bits: how 64 scores, from a place on, compare with a bound. For a NaN every comparison holds.

    A loop over the 64 would be compiled to one comparison after the other, so this is written in vectors.
    """

    def compare(_: Any, scores: Any, at: Any, bound: Any) -> Any:
        width = scores.dtype.bitwidth

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            floats = ir.VectorType(context.get_value_type(scores.dtype), WORD)
            integers = ir.VectorType(ir.IntType(width), WORD)
            lanes = ir.VectorType(ir.IntType(32), WORD)
            place = builder.gep(array.data, [arguments[1]])
            values = builder.load(builder.bitcast(place, floats.as_pointer()))
            values.align = width // 8
            if magnitude:
                without_sign = ir.Constant(integers, [2 ** (width - 1) - 1] * WORD)
                values = builder.bitcast(builder.and_(builder.bitcast(values, integers), without_sign), floats)
            undefined = ir.Constant(floats, ir.Undefined)
            first = builder.insert_element(undefined, arguments[2], ir.Constant(ir.IntType(32), 0))
            bounds = builder.shuffle_vector(first, undefined, ir.Constant(lanes, [0] * WORD))
            return builder.bitcast(builder.fcmp_unordered(operator, values, bounds), ir.IntType(WORD))

        return types.uint64(scores, types.intp, scores.dtype), generate

    return inserted(compare)


_larger = _comparison(">", magnitude=True)
_above = _comparison(">", magnitude=False)
_below = _comparison("<", magnitude=False)


@inserted
def _ones(_: Any, word: Any) -> Any:
    """How many bits are set."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@inserted
def _lowest(_: Any, word: Any) -> Any:
    """The place of the lowest bit that is set; there must be one."""
    known = ir.Constant(ir.IntType(1), 1)
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.cttz(arguments[0], known)


@inserted
def _fetch(_: Any, array: Any, at: Any) -> Any:
    """Have 64 numbers, from a place on, brought into the cache."""
    line = 512 // array.dtype.bitwidth  # numbers
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        for offset in range(0, WORD, line):
            place = builder.gep(data, [builder.add(arguments[1], arguments[1].type(offset))])
            builder.call(prefetch, [builder.bitcast(place, byte), number(0), number(3), number(1)])  # to read, to keep
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@jit
def _last_words(scores: Any, at: Any, stop: Any, low: Any, high: Any) -> Any:
    """As in `_pass`, of the fewer than 64 scores at the end of a layer."""
    larger = inside = above = below = np.uint64(0)
    for place in range(at, stop):
        bit, score = ONE << np.uint64(place - at), scores[place]
        if not abs(score) <= high:
            larger |= bit
        elif abs(score) > low:
            inside |= bit
        if not score <= 0:
            above |= bit
        if not score >= 0:
            below |= bit
    return larger, inside, above, below


@jit
def _pass(
    scores: Any, weights: Any, masked: Any, signed: Any, bits: Any, start: Any, stop: Any, low: Any, high: Any,
    near: Any,
) -> Any:  # fmt: skip
    """Bring a layer up to date with the mask |s| > high; list the places with low < |s| <= high; how many of each."""
    zero = scores.dtype.type(0)  # never −0.0
    chosen = listed = 0
    for word in range(len(bits)):
        at = start + word * WORD
        if at + WORD <= stop:
            larger = _larger(scores, at, high)
            inside = _larger(scores, at, low) & ~larger
            above, below = _above(scores, at, zero), _below(scores, at, zero)
            _fetch(masked, at)  # it has not been touched since the last step; the layers will want it next
        else:
            larger, inside, above, below = _last_words(scores, at, stop, low, high)
        chosen += _ones(larger)
        while inside:
            near[listed] = at + _lowest(inside)
            listed += 1
            inside &= inside - ONE
        changed = larger ^ bits[word, 0]
        if changed:
            bits[word, 0] = larger
            while changed:
                bit = _lowest(changed)
                masked[at + bit] = weights[at + bit] if larger >> np.uint64(bit) & ONE else zero
                changed &= changed - ONE
        changed = (above ^ bits[word, 1]) | (below ^ bits[word, 2])
        if changed:
            bits[word, 1], bits[word, 2] = above, below
            while changed:
                place = at + _lowest(changed)
                sign = (scores[place] > 0) - (scores[place] < 0)  # 0 for a NaN, as in torch
                signed[place] = weights[place] * scores.dtype.type(sign)
                changed &= changed - ONE
    return chosen, listed


@jit
def _largest(values: Any, count: Any) -> Any:
    """The count-th largest, by quickselect; leaves the values in another order."""
    place, low, high = len(values) - count, 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if place <= right:
            high = right
        elif place >= left:
            low = left
        else:
            break
    return values[place]


@jit
def _select(
    scores: Any, weights: Any, masked: Any, signed: Any, bits: Any, start: Any, stop: Any, keep: Any, low: Any,
    high: Any, near: Any,
) -> Any:  # fmt: skip
    """Bring a layer up to date; its threshold, or NaN if that is not in the band: then the mask is not right."""
    chosen, listed = _pass(scores, weights, masked, signed, bits, start, stop, low, high, near)
    wanted = keep - chosen
    if wanted == 0:
        return high
    if not 0 < wanted <= listed:
        return nan
    values = np.empty(listed, scores.dtype)
    for number in range(listed):
        values[number] = abs(scores[near[number]])
    threshold = _largest(values, wanted)
    for value in values:
        wanted -= value > threshold
    for number in range(listed):
        place = near[number]
        magnitude = abs(scores[place])
        if magnitude == threshold:  # the list is in order, so the first of equals come first
            wanted -= 1
        if magnitude > threshold or (magnitude == threshold and wanted >= 0):
            masked[place] = weights[place]
            bits[(place - start) // WORD, 0] |= ONE << np.uint64((place - start) % WORD)
    return threshold


@jit
def _width(threshold: Any, before: Any, width: Any) -> Any:
    """A band a few times as wide as the threshold's last move."""
    moved = abs(threshold / before - 1)
    return min(max(4 * moved, 0.9 * width, NARROWEST), WIDEST) if moved < inf else width


@jit
def _update(
    scores: Any, weights: Any, masked: Any, signed: Any, bits: Any, layers: Any, thresholds: Any, widths: Any,
    known: Any, near: Any,
) -> Any:  # fmt: skip
    """Bring all layers up to date; whether all thresholds are known now."""
    number = scores.dtype.type
    for layer in range(len(layers)):
        start, stop, first, last, keep = layers[layer]
        before, width = thresholds[layer], widths[layer]
        low, high = np.nextafter(number(before * (1 - width)), number(-1)), number(before * (1 + width))
        if keep == stop - start:  # all of them, wherever the threshold is
            low = high = number(-1)
        threshold = _select(scores, weights, masked, signed, bits[first:last], start, stop, keep, low, high, near)
        known[layer] = not isnan(threshold)
        if known[layer]:
            thresholds[layer], widths[layer] = threshold, _width(threshold, before, width)
    return known.all()


def _zeros(size: int, dtype: Any) -> Floats:
    """Where torch puts them, at the beginning of a cache line. NumPy does not, and every wide load would touch two."""
    zeros: Floats = torch.zeros(size, dtype=getattr(torch, np.dtype(dtype).name)).numpy()
    return zeros


class _Memory:
    """A vector, and the parts of it that are handed out as tensors."""

    def __init__(self, shapes: Shapes, dtype: Any) -> None:
        ends = np.cumsum([prod(shape) for shape in shapes])
        self.vector = _zeros(ends[-1], dtype)
        pieces = np.split(self.vector, ends[:-1])
        self._parts = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self._unheld = self._holders()

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, self._parts))

    @property
    def held(self) -> bool:
        """Whether somebody still has such a tensor, or another one of the same memory."""
        return self._holders() != self._unheld

    def _holders(self) -> list[int]:
        return list(map(sys.getrefcount, self._parts))  # a tensor's memory holds the array it was made of


class CompiledSelector(CpuSelector):
    """The masks of one set of scores while it is learned, and the weights under them.

    These stay in the same memory, so nobody may write to what is handed out. But what somebody still holds in the next
    step is left as it is.
    """

    def __init__(self, layout: Layout, keep: tuple[int, ...]) -> None:
        super().__init__(layout)
        self._one_vector = [(layout.size,)]
        self._by_layer = [layer.shape for layer in layout.layers]
        words = np.cumsum([0, *(-(-layer.size // WORD) for layer in layout.layers)])
        places = zip(layout.layers, words[:-1], words[1:], keep, strict=True)
        self._layers = np.array([(layer.start, layer.stop, first, last, count) for layer, first, last, count in places])
        self._bits = np.zeros((words[-1], 3), np.uint64)  # of 64 weights each: in the mask, s > 0, s < 0
        self._thresholds = np.full(len(keep), nan)
        self._widths = np.full(len(keep), FIRST)
        self._known = np.zeros(len(keep), np.bool_)  # whether the threshold was found in the band
        self._near = np.empty(max(layer.size for layer in layout.layers), np.int32)  # places of the band's scores
        self._weights: Tensor | None = None
        self._scores_at = 0
        self.step = 0

    def masked_weights(self, scores: Tensor, weights: Tensor) -> Tensor:
        masked: Tensor
        (masked,) = _StraightThrough.apply(scores, weights, self, self._one_vector)  # type: ignore[no-untyped-call]
        return masked

    def masked_layers(self, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        parts = _StraightThrough.apply(scores, weights, self, self._by_layer)  # type: ignore[no-untyped-call]
        return {layer.name: part for layer, part in zip(self.layout.layers, parts, strict=True)}

    def update(self, scores: Tensor, weights: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """The weights under exact masks, in parts of these shapes; ties go to the lower index."""
        known = weights is self._weights and weights._version == self._version and shapes is self._shapes
        if not known or self._masked.held:
            self._begin(weights, shapes)
        if scores.data_ptr() != self._scores_at:
            self._scores, self._scores_at = scores.detach().numpy(), scores.data_ptr()
        self.step += 1
        arguments = (
            self._scores, self._values, self._masked.vector, self._signed, self._bits, self._layers, self._thresholds,
            self._widths, self._known, self._near,
        )  # fmt: skip
        if not _update(*arguments):
            self._find_thresholds()
            _update(*arguments)
        return self._masked.tensors()

    def gradient(self, scores: Tensor, weights: Tensor, inflows: Sequence[Tensor], step: int) -> Tensor:
        """ds = sign(s) · w · dL/d(w⊙m), also for the weights outside the mask."""
        if step != self.step:  # there may have been other scores since
            return torch.cat([inflow.reshape(-1) for inflow in inflows]) * weights * scores.sign()
        if self._gradients.held:
            self._new_gradients()
        for inflow, signed, out in zip(inflows, self._signed_parts, self._gradient_parts, strict=True):
            torch.mul(inflow, signed, out=out)
        return self._gradients.tensors()[0]

    def _begin(self, weights: Tensor, shapes: Shapes) -> None:
        """As if no weight had been in a mask and all scores had been zero."""
        self._weights, self._version, self._values = weights, weights._version, weights.numpy()
        self._shapes = shapes
        self._bits.fill(0)
        self._masked = _Memory(shapes, self._values.dtype)
        self._signed = _zeros(len(self._values), self._values.dtype)
        self._signed_parts = self._parts(self._signed)
        self._new_gradients()

    def _new_gradients(self) -> None:
        self._gradients = _Memory(self._one_vector, self._values.dtype)
        self._gradient_parts = self._parts(self._gradients.vector)

    def _parts(self, vector: Floats) -> list[Tensor]:
        pieces = torch.split(torch.from_numpy(vector), [prod(shape) for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _find_thresholds(self) -> None:
        for number in np.flatnonzero(~self._known):
            start, stop, _, _, keep = self._layers[number]
            place = stop - start - keep
            threshold = np.partition(np.abs(self._scores[start:stop]), place)[place]
            self._widths[number] = _width(threshold, self._thresholds[number], self._widths[number])
            self._thresholds[number] = threshold


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, weights: Tensor, selector: CompiledSelector, shapes: Shapes
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scores, weights)
        parts = selector.update(scores, weights, shapes)
        ctx.selector, ctx.step = selector, selector.step
        return parts

    @staticmethod
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.selector.gradient(*ctx.saved_tensors, inflows, ctx.step), None, None, None
