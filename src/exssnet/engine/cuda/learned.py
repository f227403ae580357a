"""Weights some of which are learned, on a GPU: written in one launch into memory where all the others are already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from exssnet.engine.cuda import streams
from exssnet.engine.cuda.kernels import launch

BLOCK = 1024  # values that a program moves

jit_for_any_count: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["count"])  # of every task


@jit_for_any_count
def _move(
    source: tl.tensor, positions: tl.tensor, target: tl.tensor, count: tl.tensor, PUT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Put values in their positions, or take what is there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + at, mask=at < count, other=0)
    value = tl.load(source + (at if PUT else position), mask=at < count, other=0.0)
    tl.store(target + (position if PUT else at), value.to(target.dtype.element_ty), mask=at < count)


class LearnedValues:
    """A vector of weights; those at `positions` (int32) have values that are learned, which may be of another type.

    It stays in the same memory, that of `fixed`, so nobody may write to what is handed out, or keep it for the step
    after.
    """

    def __init__(self, fixed: Tensor, positions: Tensor) -> None:
        self._vector, self._places = fixed, positions

    def vector(self, values: Tensor) -> Tensor:
        """All weights; differentiable in the values.

        In a captured step they are made from its beginning on: the values may not be a result of the same step.
        """
        vector: Tensor = _Written.apply(values, self)  # type: ignore[no-untyped-call]
        return vector

    def write(self, values: Tensor) -> Tensor:
        with streams.early():
            self._move(values, self._vector, put=True)
        return self._vector.detach()

    def gradient(self, inflow: Tensor, dtype: torch.dtype) -> Tensor:
        """What flows into the learned ones."""
        out = torch.empty(len(self._places), dtype=dtype, device=inflow.device)
        self._move(inflow.contiguous(), out, put=False)
        return out

    def _move(self, source: Tensor, target: Tensor, *, put: bool) -> None:
        if count := len(self._places):
            grid = (triton.cdiv(count, BLOCK),)
            launch(_move, grid, source, self._places, target, count, PUT=put, BLOCK=BLOCK)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: LearnedValues) -> Tensor:
        ctx.weights, ctx.dtype = weights, values.dtype
        return weights.write(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.weights.gradient(gradients[0], ctx.dtype), None
