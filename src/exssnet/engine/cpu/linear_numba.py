"""The product of a batch with the few weights of a mask, on a CPU.

Inputs are laid out so that a weight meets its input of 64 examples at a time; weights outside the mask are passed over.
Sums are taken as MKL takes them for large layers in single precision where it uses AVX-512: beginning with the bias,
192 products summed up one after the other, then the sum of those added. There the result is the dense product's, bit
for bit, as long as the inputs are finite: a zero adds nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exssnet.engine.cpu.kernels_numba import WORD, masked_product
from exssnet.engine.cpu.linear import Masked
from exssnet.engine.cpu.memory import Numbers, aligned_zeros


@cache
def _room(numbers: int, dtype: Any) -> Numbers:
    """The same memory for every product of a size: each is done before the next begins."""
    return aligned_zeros(numbers, dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Numbers) -> Tensor:
    """x [B, I] times the weight [O, I] transposed; the mask has a bit for every weight that may not be zero."""
    rows, width = weight.shape
    inputs = np.ascontiguousarray(x.detach().numpy())
    out = np.empty((len(inputs), rows), inputs.dtype)
    begin = _room(0, inputs.dtype) if bias is None else bias.detach().numpy()
    masked_product(inputs, weight.detach().numpy(), mask, begin, _room((width + 2 * rows) * WORD, inputs.dtype), out)
    return torch.from_numpy(out)


class Product(torch.autograd.Function):
    """The gradients are dense: every score has one, also of a weight outside the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, masked: Masked) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.masked = masked
        return product(x, weight, bias, masked.bits)

    @staticmethod
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (inflow,), (by_x, by_weight, by_bias, _) = inflows, ctx.needs_input_grad
        return (
            inflow @ weight if by_x else None,
            torch.mm(inflow.t(), x, out=ctx.masked.room()) if by_weight else None,
            inflow.sum(0) if by_bias else None,
            None,
        )
