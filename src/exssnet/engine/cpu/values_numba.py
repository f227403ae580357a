"""Weights some of which are learned, on a CPU: written into memory where all the others are already."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from exssnet.engine.cpu.jit_numba import jit
from exssnet.engine.cpu.kernels_numba import read_values
from exssnet.engine.cpu.linear import Masked, masks_that_help, packed, with_masks
from exssnet.engine.cpu.memory import Memory, in_one_piece
from exssnet.engine.memory_format import Arrangement


@jit
def write_values(vector: Any, places: Any, values: Any) -> Any:
    """Put the values in their places."""
    for number in range(len(places)):
        vector[places[number]] = values[number]


class LearnedWeights:
    """The weights under a mask, by layer, those at `index` with values that are learned.

    They stay in the same memory, so nobody may write to what is handed out. But what somebody still holds in the next
    step is left as it is. `fixed` are all weights, arranged; `index` are those learned, in order, and in the mask.
    """

    def __init__(self, arrangement: Arrangement, fixed: Tensor, mask: Tensor, index: Tensor) -> None:
        self.layout, self._parts = arrangement.layout, arrangement.parts
        self._fixed, self._places = fixed.numpy(), arrangement.places[index].numpy()
        layout = self.layout
        starts = np.array([layer.start for layer in layout.layers], np.int64)
        stops = np.array([layer.stop for layer in layout.layers], np.int64)
        self._layers = np.stack([starts, stops, *np.searchsorted(index.numpy(), [starts, stops])], axis=1)
        self._inflows = np.zeros(len(starts), np.int64)  # where the layers' gradients are in memory
        pieces = layout.slices(mask)
        helping = masks_that_help(layout, pieces, [int(piece.count_nonzero()) for piece in pieces])
        self._masks = [None if piece is None else Masked(packed(piece)) for piece in helping]
        self._begin()

    def _begin(self) -> None:
        self._memory = Memory(self._parts, self._fixed.dtype)
        self._memory.vector[:] = self._fixed

    def by_layer(self, values: Tensor) -> dict[str, Tensor]:
        """Differentiable in the values."""
        parts = _Written.apply(values, self)  # type: ignore[no-untyped-call]
        return with_masks(self.layout, parts, self._masks)

    def write(self, values: Tensor) -> tuple[Tensor, ...]:
        """All weights, by layer."""
        if self._memory.held:
            self._begin()
        write_values(self._memory.vector, self._places, values.detach().numpy())
        return self._memory.tensors()

    def gradient(self, inflows: tuple[Tensor, ...]) -> Tensor:
        """What flows into the learned ones."""
        kept = in_one_piece(inflows, self._parts, self._inflows)
        out = np.empty(len(self._places), self._fixed.dtype)
        read_values(self._inflows, self._layers, self._places, out)
        del kept  # not earlier
        return torch.from_numpy(out)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: LearnedWeights) -> tuple[Tensor, ...]:
        ctx.weights = weights
        return weights.write(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor, None]:
        return ctx.weights.gradient(inflows), None
