"""Weights some of which are learned, on a CPU: written into memory where all the others are already."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from exssnet.core.jit_numba import WORD, Memory, Numbers, carray, jit, pointer
from exssnet.core.layout import Layout
from exssnet.core.linear import masks_that_help, with_masks


@jit
def _write(vector: Any, places: Any, values: Any) -> Any:
    for number in range(len(places)):
        vector[places[number]] = values[number]


@jit
def _read(inflows: Any, layers: Any, places: Any, out: Any) -> Any:
    """What is at the places, in order; `inflows` are the addresses of the layers' parts."""
    for layer in range(len(layers)):
        start, stop, first, last = layers[layer]
        inflow = carray(pointer(inflows[layer]), stop - start, out.dtype)
        for number in range(first, last):
            out[number] = inflow[places[number] - start]


class LearnedWeights:
    """The weights under a mask, by layer, those at `places` with values that are learned.

    They stay in the same memory, so nobody may write to what is handed out. But what somebody still holds in the next
    step is left as it is.
    """

    def __init__(self, layout: Layout, fixed: Tensor, mask: Tensor, places: Tensor) -> None:
        self.layout = layout
        self._fixed, self._places = fixed.numpy(), places.numpy()
        starts, stops = (np.array([getattr(layer, end) for layer in layout.layers]) for end in ("start", "stop"))
        self._layers = np.stack([starts, stops, *np.searchsorted(self._places, [starts, stops])], axis=1)
        self._inflows = np.zeros(len(starts), np.int64)
        pieces = layout.slices(mask)
        counts = [int(piece.count_nonzero()) for piece in pieces]
        self._masks = masks_that_help(layout, map(_words, pieces), counts)
        self._begin()

    def _begin(self) -> None:
        self._memory = Memory([layer.shape for layer in self.layout.layers], self._fixed.dtype)
        self._memory.vector[:] = self._fixed

    def by_layer(self, values: Tensor) -> dict[str, Tensor]:
        """Differentiable in the values."""
        parts = _Written.apply(values, self)  # type: ignore[no-untyped-call]
        return with_masks(self.layout, parts, self._masks)

    def write(self, values: Tensor) -> tuple[Tensor, ...]:
        if self._memory.held:
            self._begin()
        _write(self._memory.vector, self._places, values.detach().numpy())
        return self._memory.tensors()

    def gradient(self, inflows: tuple[Tensor, ...]) -> Tensor:
        parts = [inflow.contiguous() for inflow in inflows]
        for number, part in enumerate(parts):
            self._inflows[number] = part.data_ptr()
        out = np.empty(len(self._places), self._fixed.dtype)
        _read(self._inflows, self._layers, self._places, out)
        return torch.from_numpy(out)


def _words(mask: Tensor) -> Numbers:
    bits = np.zeros(-(-len(mask) // WORD) * WORD, np.bool_)
    bits[: len(mask)] = mask.numpy()
    return np.packbits(bits, bitorder="little").view(np.uint64)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: LearnedWeights) -> tuple[Tensor, ...]:
        ctx.weights = weights
        return weights.write(values)

    @staticmethod
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor, None]:
        return ctx.weights.gradient(inflows), None
