"""The selection of `selection_cpu`, compiled, and kept up to date instead of made anew.

From one step to the next few weights enter or leave a mask. So the weights under the mask are kept. A pass compares 64
scores at a time with zero and with the ends of the band around the last threshold: it keeps the signs, as bits, for the
gradient, and writes weights only where a comparison differs from the last pass's. Then the few scores inside the band
are put in order. Counts prove the masks exact; a layer where they do not is selected anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, nan
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from exssnet.core.jit_numba import (
    ONE,
    WORD,
    Memory,
    Shapes,
    carray,
    fetch,
    inserted,
    jit,
    load_vector,
    ones,
    place_of_vector,
    pointer,
)
from exssnet.core.layout import Layout
from exssnet.core.linear import masks_that_help, with_masks
from exssnet.core.selection_cpu import CpuSelector

NARROWEST, FIRST, WIDEST = 0.0005, 0.03, 0.5  # half the band's width, as a share of the threshold
AHEAD = 1024  # numbers to fetch before they are needed


def _comparison(operator: str, *, magnitude: bool, nan: bool) -> Any:
    """A word of bits: how 64 scores, from a place on, compare with a bound; `nan` is what comes out for a NaN.

    A loop over the 64 would be compiled to one comparison after the other, so this is written in vectors.
    """

    def compare(_: Any, scores: Any, at: Any, bound: Any) -> Any:
        width = scores.dtype.bitwidth

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            floats = ir.VectorType(context.get_value_type(scores.dtype), WORD)
            integers = ir.VectorType(ir.IntType(width), WORD)
            lanes = ir.VectorType(ir.IntType(32), WORD)
            values = load_vector(builder, place_of_vector(context, builder, scores, arguments[0], arguments[1]), scores)
            if magnitude:
                without_sign = ir.Constant(integers, [2 ** (width - 1) - 1] * WORD)
                values = builder.bitcast(builder.and_(builder.bitcast(values, integers), without_sign), floats)
            undefined = ir.Constant(floats, ir.Undefined)
            first = builder.insert_element(undefined, arguments[2], ir.Constant(ir.IntType(32), 0))
            bounds = builder.shuffle_vector(first, undefined, ir.Constant(lanes, [0] * WORD))
            compared = builder.fcmp_unordered if nan else builder.fcmp_ordered
            return builder.bitcast(compared(operator, values, bounds), ir.IntType(WORD))

        return types.uint64(scores, types.intp, scores.dtype), generate

    return inserted(compare)


_larger = _comparison(">", magnitude=True, nan=True)
_below = _comparison("<", magnitude=False, nan=False)
_equal = _comparison("==", magnitude=False, nan=True)


@inserted
def _multiply(_: Any, inflow: Any, at: Any, weights: Any, place: Any, negative: Any, out: Any) -> Any:
    """out = inflow · w for 64 weights from a place on, −w where a bit says so. numba would not vectorise a loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        inflow_, at_, weights_, place_, negative_, out_ = arguments
        values = load_vector(builder, place_of_vector(context, builder, weights, weights_, place_), weights)
        bits = builder.bitcast(negative_, ir.VectorType(ir.IntType(1), WORD))
        turned = builder.select(bits, builder.fneg(values), values)
        factors = load_vector(builder, place_of_vector(context, builder, inflow, inflow_, at_), inflow)
        stored = builder.store(builder.fmul(factors, turned), place_of_vector(context, builder, out, out_, place_))
        stored.align = out.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(inflow, types.intp, weights, types.intp, types.uint64, out), generate


@inserted
def _lowest(_: Any, word: Any) -> Any:
    """The place of the lowest bit that is set; there must be one."""
    known = ir.Constant(ir.IntType(1), 1)
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.cttz(arguments[0], known)


@jit
def _last_words(scores: Any, at: Any, stop: Any, low: Any, high: Any) -> Any:
    """As in `_pass`, of the fewer than 64 scores at the end of a layer."""
    larger = inside = negative = none = np.uint64(0)
    for place in range(at, stop):
        bit, score = ONE << np.uint64(place - at), scores[place]
        if not abs(score) <= high:
            larger |= bit
        elif abs(score) > low:
            inside |= bit
        if score < 0:
            negative |= bit
        elif not score > 0:
            none |= bit
    return larger, inside, negative, none


@jit
def _pass(
    scores: Any, weights: Any, masked: Any, bits: Any, start: Any, stop: Any, low: Any, high: Any, near: Any
) -> Any:
    """Bring a layer up to date with the mask |s| > high, but for the places with low < |s| <= high, which are listed.

    Returns how many there are of each.
    """
    zero = scores.dtype.type(0)  # never −0.0
    chosen = listed = 0
    for word in range(len(bits)):
        at = start + word * WORD
        if at + WORD <= stop:
            larger = _larger(scores, at, high)
            inside = _larger(scores, at, low) & ~larger
            negative, none = _below(scores, at, zero), _equal(scores, at, zero)
            fetch(masked, at)  # it has not been touched since the last step; the layers will want it next
        else:
            larger, inside, negative, none = _last_words(scores, at, stop, low, high)
        bits[word, 1], bits[word, 2] = negative, none
        chosen += ones(larger)
        changed = (larger ^ bits[word, 0]) & ~inside
        bits[word, 0] ^= changed
        while changed:
            bit = _lowest(changed)
            masked[at + bit] = weights[at + bit] if larger >> np.uint64(bit) & ONE else zero
            changed &= changed - ONE
        while inside:
            near[listed] = at + _lowest(inside)
            listed += 1
            inside &= inside - ONE
    return chosen, listed


@jit
def _largest(levels: Any, count: Any, low: Any, high: Any) -> Any:
    """The count-th largest of integers above `low` and at most `high`, by bisection: no branch has to be guessed."""
    while high - low > 1:
        middle = levels.dtype.type(low + (high - low) // 2)
        above = 0
        for level in levels:
            above += level > middle
        if above < count:
            high = middle
        else:
            low = middle
    return high


@jit
def _select(
    scores: Any, levels: Any, weights: Any, masked: Any, bits: Any, start: Any, stop: Any, keep: Any, low: Any,
    high: Any, near: Any, near_levels: Any,
) -> Any:  # fmt: skip
    """Bring a layer up to date; its threshold, or NaN if that is not in the band: then the mask is not right."""
    chosen, listed = _pass(scores, weights, masked, bits, start, stop, low, high, near)
    wanted = keep - chosen
    if not 0 <= wanted <= listed:
        return nan
    without_sign = np.iinfo(levels.dtype).max
    least, most = without_sign, 0
    for number in range(listed):
        level = levels[near[number]] & without_sign
        near_levels[number] = level
        least, most = min(least, level), max(most, level)
    threshold = _largest(near_levels[:listed], wanted, least - 1, most) if wanted else most
    for number in range(listed):
        wanted -= near_levels[number] > threshold
    for number in range(listed):
        place, level = near[number], near_levels[number]
        if level == threshold:  # the list is in order, so the first of equals come first
            wanted -= 1
            high = abs(scores[place])
        belongs = level > threshold or (level == threshold and wanted >= 0)
        word, bit = (place - start) // WORD, np.uint64((place - start) % WORD)
        if belongs != (bits[word, 0] >> bit & ONE):
            bits[word, 0] ^= ONE << bit
            masked[place] = weights[place] if belongs else scores.dtype.type(0)
    return high


@jit
def _width(threshold: Any, expected: Any, width: Any) -> Any:
    """A band a few times as wide as the last error."""
    error = abs(threshold / expected - 1)
    return min(max(4 * error, 0.95 * width, NARROWEST), WIDEST) if error < inf else width


@jit
def _update(
    scores: Any, levels: Any, weights: Any, masked: Any, bits: Any, layers: Any, thresholds: Any, moves: Any,
    widths: Any, known: Any, near: Any, near_levels: Any,
) -> Any:  # fmt: skip
    """Bring all layers up to date; whether all thresholds are known now."""
    number = scores.dtype.type
    for layer in range(len(layers)):
        start, stop, first, last, keep = layers[layer]
        expected, width = thresholds[layer] + moves[layer], widths[layer]  # that it moves as it did last
        low, high = np.nextafter(number(expected * (1 - width)), number(-1)), number(expected * (1 + width))
        if keep == stop - start:  # all of them, wherever the threshold is
            low = high = number(-1)
        threshold = _select(
            scores, levels, weights, masked, bits[first:last], start, stop, keep, low, high, near, near_levels
        )
        known[layer] = not isnan(threshold)
        if known[layer]:
            moves[layer] = threshold - thresholds[layer]
            thresholds[layer], widths[layer] = threshold, _width(threshold, expected, width)
    return known.all()


@jit
def _product(inflows: Any, weights: Any, bits: Any, layers: Any, out: Any) -> Any:
    """out = inflow · w · sign(s), where `inflows` are the addresses of the layers' parts of it."""
    for layer in range(len(layers)):
        start, stop, first, last, _ = layers[layer]
        inflow = carray(pointer(inflows[layer]), stop - start, out.dtype)
        for word in range(first, last):
            at = (word - first) * WORD
            negative, none = bits[word, 1], bits[word, 2]
            if start + at + WORD <= stop and not none:
                fetch(weights, start + at + AHEAD)
                _multiply(inflow, at, weights, start + at, negative, out)
            else:
                for place in range(at, min(at + WORD, stop - start)):
                    bit = np.uint64(place - at)
                    sign = 0 if none >> bit & ONE else 1 - 2 * int(negative >> bit & ONE)
                    out[start + place] = inflow[place] * (weights[start + place] * out.dtype.type(sign))


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
        self._thresholds = np.full(len(keep), nan)
        self._moves = np.zeros(len(keep))
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
        return with_masks(self.layout, parts, self._masks)

    def update(self, scores: Tensor, weights: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """The weights under exact masks, in parts of these shapes; ties go to the lower index."""
        known = weights is self._weights and weights._version == self._version and shapes is self._shapes
        if not known or self._masked.held:
            self._begin(weights, shapes)
        if scores.data_ptr() != self._scores_at:
            self._scores, self._scores_at = scores.detach().numpy(), scores.data_ptr()
            self._levels = self._scores.view(f"i{self._scores.itemsize}")  # positive floats are in order as integers
            self._near_levels = np.empty(len(self._near), self._levels.dtype)
        self.step += 1
        arguments = (
            self._scores, self._levels, self._values, self._masked.vector, self._bits, self._layers, self._thresholds,
            self._moves, self._widths, self._known, self._near, self._near_levels,
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
        parts = [inflow.contiguous() for inflow in inflows]
        if len(parts) == 1:
            np.add(self._offsets, parts[0].data_ptr(), out=self._inflows)
        else:
            for number, part in enumerate(parts):
                self._inflows[number] = part.data_ptr()
        _product(self._inflows, self._values, self._bits, self._layers, self._gradients.vector)
        return self._gradients.tensors()[0]

    def _begin(self, weights: Tensor, shapes: Shapes) -> None:
        """As if no weight had been in a mask."""
        self._weights, self._version, self._values = weights, weights._version, weights.numpy()
        self._shapes = shapes
        words = self._layers[:, 2:4]
        self._bits = np.zeros((words[-1, 1], 3), np.uint64)  # of 64 weights each: in the mask, s < 0, s without a sign
        masks = [self._bits[first:last, 0] for first, last in words]
        self._masks = masks_that_help(self.layout, masks, self._layers[:, 4])
        self._masked = Memory(shapes, self._values.dtype)
        self._offsets = self._layers[:, 0] * self._values.itemsize  # where a layer begins in one vector, in bytes
        self._inflows = np.zeros_like(self._offsets)  # where its gradient is in memory
        self._new_gradients()

    def _new_gradients(self) -> None:
        self._gradients = Memory(self._one_vector, self._values.dtype)

    def _find_thresholds(self) -> None:
        """Where the band was wrong; all layers' next bands are around the thresholds that they have now."""
        for number in np.flatnonzero(~self._known):
            start, stop, _, _, keep = self._layers[number]
            place = stop - start - keep
            threshold = np.partition(np.abs(self._scores[start:stop]), place)[place]
            self._widths[number] = _width(threshold, self._thresholds[number], self._widths[number])
            self._thresholds[number] = threshold
        self._moves.fill(0)


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
