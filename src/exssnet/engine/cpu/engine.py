"""The engine for a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exssnet.core.engine import Engine, Runner, Weights
from exssnet.core.layout import Layout
from exssnet.core.module.structure import Structure
from exssnet.engine.cpu.convolution import channels_last, guard


class CpuRunner(Runner):
    """Runs a module with its 2-D convolutions in channels-last memory format."""

    def __init__(self, structure: Structure, layout: Layout, device: torch.device) -> None:
        super().__init__(structure, layout, device)
        self._convolutions = {layer.name for layer in layout.layers if layer.convolution}
        if self._convolutions:
            guard(self.module)

    def weights(self, vector: Tensor) -> Weights:
        tensors = self.layout.tensors(vector)
        return tensors | {name: _weight_channels_last(tensors[name]) for name in self._convolutions}

    def selection(self, keep: tuple[int, ...]) -> Callable[[Tensor, Tensor], Weights]:
        try:
            from exssnet.engine.cpu.selection import CpuSelection
        except ImportError:  # no numba, or one that does not fit this numpy
            return super().selection(keep)

        masked = CpuSelection(self.layout, keep)

        def select(scores: Tensor, weights: Tensor) -> Weights:
            if weights.requires_grad:  # a mask of ones carries the gradient to the scores, the product to the weights
                return self.weights(weights * masked(scores, torch.ones_like(weights)))
            return self.weights(masked(scores, weights))

        return select

    def call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return super().call(tensors, channels_last(x) if self._convolutions and x.ndim == 4 else x)


def _weight_channels_last(weight: Tensor) -> Tensor:
    """The same as `channels_last`, with strides that say so also where there is one channel or one point."""
    out, channels, height, width = weight.shape
    return weight.permute(0, 2, 3, 1).reshape(-1).view(out, height, width, channels).permute(0, 3, 1, 2)


class CpuEngine(Engine):
    """The fast way on a CPU."""

    name = "cpu"

    def runner(self, structure: Structure, layout: Layout, device: torch.device) -> Runner:
        return CpuRunner(structure, layout, device)
