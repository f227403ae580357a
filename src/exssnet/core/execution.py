"""How a network computes, as apart from what: number type, order of memory, compiled or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Execution:
    """The plain way by default: the module's own number type and order of memory, no compiler."""

    autocast: torch.dtype | None = None  # bfloat16: weights are cast once, as one vector
    channels_last: bool = False  # 2-D convolutions
    compiled: bool = False  # the training step's forward and backward pass


class Arrange(torch.autograd.Function):
    """A vector in another order; the gradient goes back by a plain read, since every place is taken once."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return vector[sources]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None
