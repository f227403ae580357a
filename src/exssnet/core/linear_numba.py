"""The product of a batch with the few weights of a mask, on a CPU.

Inputs are laid out so that a weight meets its input of 64 examples at a time; weights outside the mask are passed over.
Sums are taken as MKL takes them for layers as large as ours where it uses AVX-512: 192 products one after the other,
then the sums of those. There the result is the dense product's, bit for bit, since a zero adds nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from torch import Tensor

from exssnet.core.jit_numba import ONE, WORD, Numbers, inserted, jit, load_vector, place_of_vector

BLOCK = 192  # inputs whose products are summed up apart


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
        place = place_of_vector(context, builder, sums, sums_, builder.mul(row_, ir.Constant(word, WORD)))
        begun = load_vector(builder, place, sums)
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
        values = load_vector(builder, place_of_vector(context, builder, inputs, inputs_, example), inputs)
        left.add_incoming(builder.and_(left, builder.sub(left, ir.Constant(word, 1))), add)
        total.add_incoming(builder.call(fused, [spread, values, total]), add)
        builder.branch(ask)

        builder.position_at_end(end)
        builder.store(total, place).align = sums.dtype.bitwidth // 8
        return context.get_dummy_value()

    integer = types.intp
    return types.void(sums, integer, weights, integer, inputs, integer, types.uint64), generate


@jit
def _window(words: Any, at: Any, count: Any) -> Any:
    """The bits from a place on, 64 or fewer of them."""
    word, shift = at // WORD, np.uint64(at % WORD)
    found = words[word] >> shift
    if shift and word + 1 < len(words):
        found |= words[word + 1] << (np.uint64(WORD) - shift)
    return found if count >= WORD else found & ((ONE << np.uint64(count)) - ONE)


@jit
def _multiply(inputs: Any, weights: Any, words: Any, width: Any, sums: Any, out: Any) -> Any:
    """out [outputs · 64] = the layer's outputs for 64 examples; inputs are [width · 64], weights [outputs · width]."""
    out[:] = 0
    for block in range(0, width, BLOCK):
        sums[:] = 0
        stop = min(block + BLOCK, width)
        for first in range(block, stop, WORD):  # of 64 inputs all outputs, while the inputs are in the cache
            for row in range(len(weights) // width):
                at = row * width + first
                _add(sums, row, weights, at, inputs, first, _window(words, at, stop - first))
        for number in range(len(out)):
            out[number] += sums[number]


def product(x: Tensor, weight: Tensor, mask: Numbers) -> Tensor:
    """x [B, I] times the weight [O, I] transposed; the mask has a bit for every weight that may not be zero."""
    rows, width = weight.shape
    weights = weight.detach().view(-1).numpy()
    whole = x.new_empty(len(x), rows)
    inputs, out, sums = x.new_empty(width, WORD), x.new_empty(rows, WORD), x.new_empty(rows * WORD).numpy()
    for at in range(0, len(x), WORD):
        examples = x[at : at + WORD]
        inputs[:, : len(examples)] = examples.t()
        inputs[:, len(examples) :] = 0
        _multiply(inputs.view(-1).numpy(), weights, mask, width, sums, out.view(-1).numpy())
        whole[at : at + WORD] = out.t()[: len(examples)]
    return whole


class Product(torch.autograd.Function):
    """The gradients are dense: every score has one, also of a weight outside the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Numbers) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.detach(), weight, mask)

    @staticmethod
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (inflow,), (by_x, by_weight, _) = inflows, ctx.needs_input_grad
        return inflow @ weight if by_x else None, inflow.t() @ x if by_weight else None, None
