"""Kernels of a CPU, compiled by numba.

All that use one another are in this file, since what was compiled is kept from one process to the next and made anew
only when the file of a kernel changes, not when another file that it takes something from does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan, nan
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from exssnet.engine.cpu.jit_numba import jit

WORD = 64  # bits, and numbers in a vector
ONE = np.uint64(1)
NARROWEST, FIRST, WIDEST = 0.0005, 0.03, 0.5  # half a band's width, as a share of the threshold
AHEAD = 1024  # numbers to fetch before they are needed
BLOCK = 192  # inputs whose products are summed up apart

inserted: Callable[[Callable[..., Any]], Any] = intrinsic  # code that is written for the compiler
carray: Callable[..., Any] = numba.carray  # type: ignore[attr-defined]  # what is at a pointer


# Code in vectors of 64 numbers, which the compiler would not make of loops


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where the 64 numbers of an array from a place on are; they may begin anywhere."""
    data = context.make_array(kind)(context, builder, array).data
    floats = ir.VectorType(context.get_value_type(kind.dtype), WORD)
    return builder.bitcast(builder.gep(data, [at]), floats.as_pointer())


def _load(builder: Any, place: Any, kind: Any) -> Any:
    """The 64 numbers there."""
    values = builder.load(place)
    values.align = kind.dtype.bitwidth // 8
    return values


def _comparison(operator: str, *, magnitude: bool, nan: bool) -> Any:
    """A word of bits: how 64 scores, from a place on, compare with a bound; `nan` is what comes out for a NaN."""

    def compare(_: Any, scores: Any, at: Any, bound: Any) -> Any:
        width = scores.dtype.bitwidth

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            floats = ir.VectorType(context.get_value_type(scores.dtype), WORD)
            integers = ir.VectorType(ir.IntType(width), WORD)
            lanes = ir.VectorType(ir.IntType(32), WORD)
            values = _load(builder, _place(context, builder, scores, arguments[0], arguments[1]), scores)
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
        values = _load(builder, _place(context, builder, weights, weights_, place_), weights)
        bits = builder.bitcast(negative_, ir.VectorType(ir.IntType(1), WORD))
        turned = builder.select(bits, builder.fneg(values), values)
        factors = _load(builder, _place(context, builder, inflow, inflow_, at_), inflow)
        stored = builder.store(builder.fmul(factors, turned), _place(context, builder, out, out_, place_))
        stored.align = out.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(inflow, types.intp, weights, types.intp, types.uint64, out), generate


@inserted
def _add(_: Any, sums: Any, row: Any, weights: Any, at: Any, inputs: Any, first: Any, chosen: Any) -> Any:
    """Add weight · input to a row of 64 sums, for the chosen of 64 weights and inputs from a place on.

    The sums stay in registers meanwhile, which a loop over an array of them would not get from the compiler.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, row_, weights_, at_, inputs_, first_, chosen_ = arguments
        vector = ir.VectorType(context.get_value_type(sums.dtype), WORD)
        word, lane = ir.IntType(WORD), ir.IntType(32)
        undefined = ir.Constant(vector, ir.Undefined)
        fused = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{WORD}f{sums.dtype.bitwidth}"
        )
        data = context.make_array(weights)(context, builder, weights_).data
        place = _place(context, builder, sums, sums_, builder.mul(row_, ir.Constant(word, WORD)))
        begun = _load(builder, place, sums)
        before = builder.block
        ask, add, end = (builder.append_basic_block(name) for name in ("ask", "add", "end"))
        builder.branch(ask)

        builder.position_at_end(ask)
        left, total = builder.phi(word), builder.phi(vector)
        left.add_incoming(chosen_, before)
        total.add_incoming(begun, before)
        builder.cbranch(builder.icmp_unsigned("!=", left, ir.Constant(word, 0)), add, end)

        builder.position_at_end(add)
        bit = builder.cttz(left, ir.Constant(ir.IntType(1), 1))
        weight = builder.load(builder.gep(data, [builder.add(at_, bit)]))
        one = builder.insert_element(undefined, weight, ir.Constant(lane, 0))
        spread = builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(lane, WORD), [0] * WORD))
        example = builder.mul(builder.add(first_, bit), ir.Constant(word, WORD))
        values = _load(builder, _place(context, builder, inputs, inputs_, example), inputs)
        left.add_incoming(builder.and_(left, builder.sub(left, ir.Constant(word, 1))), add)
        total.add_incoming(builder.call(fused, [spread, values, total]), add)
        builder.branch(ask)

        builder.position_at_end(end)
        builder.store(total, place).align = sums.dtype.bitwidth // 8
        return context.get_dummy_value()

    integer = types.intp
    return types.void(sums, integer, weights, integer, inputs, integer, types.uint64), generate


# Other instructions


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


@inserted
def _pointer(_: Any, address: Any) -> Any:
    """To the memory at an address; an array would take Python a microsecond to make, and as long to hand over."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


# Masks of scores (selection_numba.py)


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
    scores: Any, weights: Any, masked: Any, places: Any, bits: Any, start: Any, stop: Any, low: Any, high: Any,
    near: Any,
) -> Any:  # fmt: skip
    """Bring a layer up to date with the mask |s| > high, but for the scores with low < |s| <= high, which are listed.

    Returns how many there are of each. A weight's place in `masked` may be another than its own.
    """
    zero = scores.dtype.type(0)  # never −0.0
    chosen = listed = 0
    for word in range(len(bits)):
        at = start + word * WORD
        if at + WORD <= stop:
            larger = _larger(scores, at, high)
            inside = _larger(scores, at, low) & ~larger
            negative, none = _below(scores, at, zero), _equal(scores, at, zero)
            _fetch(masked, at)  # it has not been touched since the last step; the layers will want it next
        else:
            larger, inside, negative, none = _last_words(scores, at, stop, low, high)
        bits[word, 1], bits[word, 2] = negative, none
        chosen += _ones(larger)
        changed = (larger ^ bits[word, 0]) & ~inside
        bits[word, 0] ^= changed
        while changed:
            bit = _lowest(changed)
            masked[places[at + bit]] = weights[at + bit] if larger >> np.uint64(bit) & ONE else zero
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
    scores: Any, levels: Any, weights: Any, masked: Any, places: Any, bits: Any, start: Any, stop: Any, keep: Any,
    low: Any, high: Any, near: Any, near_levels: Any,
) -> Any:  # fmt: skip
    """Bring a layer up to date; its threshold, or NaN if that is not in the band: then the mask is not right."""
    chosen, listed = _pass(scores, weights, masked, places, bits, start, stop, low, high, near)
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
            masked[places[place]] = weights[place] if belongs else scores.dtype.type(0)
    return high


@jit
def band_width(threshold: Any, expected: Any, width: Any) -> Any:
    """A band a few times as wide as the last error."""
    error = abs(threshold / expected - 1)
    return min(max(4 * error, 0.95 * width, NARROWEST), WIDEST) if error < inf else width


@jit
def update_masks(
    scores: Any, levels: Any, weights: Any, masked: Any, places: Any, bits: Any, layers: Any, thresholds: Any,
    moves: Any, widths: Any, known: Any, near: Any, near_levels: Any,
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
            scores, levels, weights, masked, places, bits[first:last], start, stop, keep, low, high, near, near_levels
        )
        known[layer] = not isnan(threshold)
        if known[layer]:
            moves[layer] = threshold - thresholds[layer]
            thresholds[layer], widths[layer] = threshold, band_width(threshold, expected, width)
    return known.all()


@jit
def score_gradient(
    inflows: Any, weights: Any, places: Any, moved: Any, bits: Any, layers: Any, ordered: Any, out: Any
) -> Any:
    """out = inflow · w · sign(s), where `inflows` are the addresses of the layers' parts of it.

    Those of a layer that is `moved` are at the places of its weights, and are put in order first.
    """
    for layer in range(len(layers)):
        start, stop, first, last, _ = layers[layer]
        inflow = carray(_pointer(inflows[layer]), stop - start, out.dtype)
        if moved[layer]:
            for number in range(stop - start):
                ordered[number] = inflow[places[start + number] - start]
            inflow = ordered
        for word in range(first, last):
            at = (word - first) * WORD
            negative, none = bits[word, 1], bits[word, 2]
            if start + at + WORD <= stop and not none:
                _fetch(weights, start + at + AHEAD)
                _multiply(inflow, at, weights, start + at, negative, out)
            else:
                for place in range(at, min(at + WORD, stop - start)):
                    bit = np.uint64(place - at)
                    sign = 0 if none >> bit & ONE else 1 - 2 * int(negative >> bit & ONE)
                    out[start + place] = inflow[place] * (weights[start + place] * out.dtype.type(sign))


# The product with a masked layer (linear_numba.py)


@jit
def _window(words: Any, at: Any, count: Any) -> Any:
    """The bits from a place on, 64 or fewer of them."""
    word, shift = at // WORD, np.uint64(at % WORD)
    found = words[word] >> shift
    if shift and word + 1 < len(words):
        found |= words[word + 1] << (np.uint64(WORD) - shift)
    return found if count >= WORD else found & ((ONE << np.uint64(count)) - ONE)


@jit
def masked_product(x: Any, weights: Any, words: Any, bias: Any, room: Any, whole: Any) -> Any:
    """A layer's outputs for examples x [B, width], into whole [B, outputs]; weights are [outputs, width].

    Examples are taken 64 at a time, as columns. `room` is for those, the sums and the outputs, 64 of each.
    """
    (rows, width), weights = weights.shape, weights.reshape(-1)
    inputs, sums, out = room[: width * WORD], room[width * WORD : (width + rows) * WORD], room[(width + rows) * WORD :]
    for begin in range(0, len(x), WORD):
        some = min(len(x) - begin, WORD)
        for number in range(width):
            for example in range(some):
                inputs[number * WORD + example] = x[begin + example, number]
            inputs[number * WORD + some : (number + 1) * WORD] = 0
        for row in range(rows):
            out[row * WORD : (row + 1) * WORD] = bias[row] if len(bias) else 0
        for block in range(0, width, BLOCK):
            sums[:] = 0
            stop = min(block + BLOCK, width)
            for first in range(block, stop, WORD):  # of 64 inputs all outputs, while the inputs are in the cache
                for row in range(rows):
                    at = row * width + first
                    _add(sums, row, weights, at, inputs, first, _window(words, at, stop - first))
            for number in range(len(out)):
                out[number] += sums[number]
        for example in range(some):
            for row in range(rows):
                whole[begin + example, row] = out[row * WORD + example]


# Learned values (learned_numba.py)


@jit
def read_values(inflows: Any, layers: Any, places: Any, out: Any) -> Any:
    """What is at the places, in order; `inflows` are the addresses of the layers' parts."""
    for layer in range(len(layers)):
        start, stop, first, last = layers[layer]
        inflow = carray(_pointer(inflows[layer]), stop - start, out.dtype)
        for number in range(first, last):
            out[number] = inflow[places[number] - start]
