"""The selection of `selection_cpu`, compiled, and kept up to date instead of made anew.

From one step to the next few weights enter or leave a mask. So the weights under the mask are kept. A pass compares 64
scores at a time with zero and with the ends of a band, which is where the threshold will be if it moves as it did last:
it keeps the signs, as bits, for the gradient, and writes weights only where the mask changes. Then the few scores in
the band are put in order. Counts prove the masks exact; a layer where they do not is selected anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from exssnet.engine.cpu.kernels_numba import FIRST, WORD, band_width, score_gradient, update_masks
from exssnet.engine.cpu.linear import Masked, masks_that_help, with_masks
from exssnet.engine.cpu.memory import Memory, Part, in_one_piece
from exssnet.engine.cpu.selection_cpu import CpuSelector
from exssnet.engine.memory_format import Arrangement


class CompiledSelector(CpuSelector):
    """The masks of one set of scores while it is learned, and the weights under them.

    These stay in the same memory, so nobody may write to what is handed out. But what somebody still holds in the next
    step is left as it is.
    """

    def __init__(self, arrangement: Arrangement, keep: tuple[int, ...]) -> None:
        super().__init__(arrangement)
        layout = self.layout
        self._one_vector, self._by_layer = [Part((layout.size,))], arrangement.parts
        words = np.cumsum([0, *(-(-layer.size // WORD) for layer in layout.layers)])
        places = zip(layout.layers, words[:-1], words[1:], keep, strict=True)
        rows = [(layer.start, layer.stop, first, last, count) for layer, first, last, count in places]
        self._layers = np.array(rows, np.int64)
        self._thresholds = np.full(len(keep), nan)
        self._moves = np.zeros(len(keep))  # how far each threshold went in the last step
        self._widths = np.full(len(keep), FIRST)
        self._known = np.zeros(len(keep), np.bool_)  # whether the threshold was found in the band
        self._near = np.empty(max(layer.size for layer in layout.layers), np.int32)  # places of the band's scores
        self._weights: Tensor | None = None
        self._scores_at = 0
        self._given: set[int] = set()  # layers whose room for a gradient is taken in this step
        self.step = 0

    def masked_weights(self, scores: Tensor, weights: Tensor) -> Tensor:
        masked: Tensor
        (masked,) = _StraightThrough.apply(scores, weights, self, self._one_vector)  # type: ignore[no-untyped-call]
        return masked

    def masked_layers(self, scores: Tensor, weights: Tensor) -> dict[str, Tensor]:
        if self.arrangement.filled:
            return super().masked_layers(scores, weights)
        layers = _StraightThrough.apply(scores, weights, self, self._by_layer)  # type: ignore[no-untyped-call]
        return with_masks(self.layout, layers, self._masks)

    def update(self, scores: Tensor, weights: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
        """The weights under exact masks, in these parts; ties go to the lower index."""
        known = weights is self._weights and weights._version == self._version and parts is self._parts
        if not known or self._masked.held:
            self._begin(weights, parts)
        if scores.data_ptr() != self._scores_at:
            self._scores, self._scores_at = scores.detach().numpy(), scores.data_ptr()
            self._levels = self._scores.view(f"i{self._scores.itemsize}")  # positive floats are in order as integers
            self._near_levels = np.empty(len(self._near), self._levels.dtype)
        self.step += 1
        self._given.clear()
        arguments = (
            self._scores, self._levels, self._values, self._masked.vector, self._places, self._bits, self._layers,
            self._thresholds, self._moves, self._widths, self._known, self._near, self._near_levels,
        )  # fmt: skip
        if not update_masks(*arguments):
            self._find_thresholds()
            update_masks(*arguments)
        return self._masked.tensors()

    def gradient(self, scores: Tensor, weights: Tensor, inflows: Sequence[Tensor], step: int) -> Tensor:
        """ds = sign(s) · w · dL/d(w⊙m), also for the weights outside the mask."""
        if step != self.step:  # there may have been other scores since
            return torch.cat([inflow.reshape(-1) for inflow in inflows]) * weights * scores.sign()
        if not self._given and self._gradients.held:
            self._new_gradients()
        kept = in_one_piece(inflows, self._parts, self._inflows)  # some may be in their room already
        if len(kept) == 1:  # one vector of all layers
            np.add(self._inflows[0], self._offsets, out=self._inflows)
        score_gradient(
            self._inflows, self._values, self._places, self._moved, self._bits, self._layers, self._ordered,
            self._gradients.vector,
        )  # fmt: skip
        del kept  # not earlier
        return self._gradients.whole()

    def _room(self, layer: int) -> Tensor | None:
        """Where a layer's gradient may be written, once a step: there it is turned into that of the scores."""
        if layer in self._given or (not self._given and self._gradients.held):
            return None
        self._given.add(layer)
        return self._gradients.part(layer)

    def _begin(self, weights: Tensor, parts: list[Part]) -> None:
        """As if no weight had been in a mask."""
        self._weights, self._version, self._values = weights, weights._version, weights.numpy()
        self._parts = parts
        plain = parts is self._one_vector
        self._places = np.arange(self.layout.size, dtype=np.int32) if plain else self.arrangement.places.numpy()
        self._moved = np.zeros(len(self._layers), np.bool_)
        if not plain:
            self._moved[:] = [part.channels_last for part in parts]
        words = self._layers[:, 2:4]
        self._bits = np.zeros((words[-1, 1], 3), np.uint64)  # of 64 weights each: in the mask, s < 0, s without a sign
        masks = [self._bits[first:last, 0] for first, last in words]
        helping = enumerate(masks_that_help(self.layout, masks, self._layers[:, 4]))
        self._masks = [None if mask is None else Masked(mask, partial(self._room, layer)) for layer, mask in helping]
        self._masked = Memory(parts, self._values.dtype)
        self._ordered = np.empty(len(self._near), self._values.dtype)  # room for a layer's gradient in the plain order
        self._offsets = self._layers[:, 0] * self._values.itemsize  # where a layer begins in one vector, in bytes
        self._inflows = np.zeros_like(self._offsets)  # where its gradient is in memory
        self._new_gradients()

    def _new_gradients(self) -> None:
        self._gradients = Memory([Part(layer.shape) for layer in self.layout.layers], self._values.dtype)

    def _find_thresholds(self) -> None:
        """Where the band was wrong; all layers' next bands are around the thresholds that they have now."""
        for number in np.flatnonzero(~self._known):
            start, stop, _, _, keep = self._layers[number]
            place = stop - start - keep
            threshold = np.partition(np.abs(self._scores[start:stop]), place)[place]
            self._widths[number] = band_width(threshold, self._thresholds[number], self._widths[number])
            self._thresholds[number] = threshold
        self._moves.fill(0)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, weights: Tensor, selector: CompiledSelector, parts: list[Part]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scores, weights)
        masked = selector.update(scores, weights, parts)
        ctx.selector, ctx.step = selector, selector.step
        return masked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *inflows: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.selector.gradient(*ctx.saved_tensors, inflows, ctx.step), None, None, None
