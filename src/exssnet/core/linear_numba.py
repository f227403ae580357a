"""The product of a batch with the few weights of a mask, on a CPU.

Inputs are laid out so that a weight meets its input of 64 examples at a time; weights outside the mask are passed over.
Sums are taken as MKL takes them for large layers in single precision where it uses AVX-512: beginning with the bias,
192 products summed up one after the other, then the sum of those added. There the result is the dense product's, bit
for bit, as long as the inputs are finite: a zero adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exssnet.core.kernels_numba import WORD, masked_product
from exssnet.core.memory import Numbers


def product(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Numbers) -> Tensor:
    """x [B, I] times the weight [O, I] transposed; the mask has a bit for every weight that may not be zero."""
    rows, width = weight.shape
    weights = weight.detach().view(-1).numpy()
    whole = x.new_empty(len(x), rows)
    inputs, out, sums = x.new_empty(width, WORD), x.new_empty(rows, WORD), x.new_empty(rows * WORD).numpy()
    for at in range(0, len(x), WORD):
        examples = x[at : at + WORD]
        inputs[:, : len(examples)] = examples.t()
        inputs[:, len(examples) :] = 0
        out[:] = 0 if bias is None else bias.view(-1, 1)
        masked_product(inputs.view(-1).numpy(), weights, mask, width, sums, out.view(-1).numpy())
        whole[at : at + WORD] = out.t()[: len(examples)]
    return whole


class Product(torch.autograd.Function):
    """The gradients are dense: every score has one, also of a weight outside the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Numbers) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias, mask)

    @staticmethod
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (inflow,), (by_x, by_weight, by_bias, _) = inflows, ctx.needs_input_grad
        return (
            inflow @ weight if by_x else None,
            inflow.t() @ x if by_weight else None,
            inflow.sum(0) if by_bias else None,
            None,
        )
