"""The order of memory in which a module runs, where that is not the order of the flat vector.

2-D convolutions run fastest in channels-last order, on a GPU with a multiple of 8 channels. An arranged vector holds
their weights so, with zeros where channels are filled up; scores, masks and the weights themselves stay in the plain
order.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor

from exssnet.core.layout import Layer, Layout
from exssnet.core.module.skeleton import Runner
from exssnet.engine.cpu.memory import Part
from exssnet.engine.cuda import second_stream as side
from exssnet.engine.execution import Execution


class Arrangement:
    """Where each weight of a layout goes."""

    def __init__(
        self, layout: Layout, channels_last: bool = False, multiple: int = 1, device: str | torch.device = "cpu",
        unfilled: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.layout = layout
        self._channels_last, self._multiple, self._unfilled = channels_last, multiple, unfilled
        self.parts = [Part(self._shape(layer), self._is_convolution(layer)) for layer in layout.layers]
        self._sizes = [prod(part.shape) for part in self.parts]
        self.size = sum(self._sizes)
        self.plain = not any(self._is_convolution(layer) for layer in layout.layers)  # nothing to do
        self.filled = self.size > layout.size  # there are zeros between the weights
        order = torch.arange(self.size, dtype=torch.int32)
        real = [self._cut(layer, piece) for layer, piece in zip(layout.layers, self._pieces(order), strict=True)]
        self.places = torch.cat([piece.reshape(-1) for piece in real]).to(device)  # int32 [size of the layout]

    def to(self, device: str | torch.device) -> None:
        self.places = self.places.to(device)

    def __call__(self, vector: Tensor) -> Tensor:
        """The weights in their places, zeros between them; differentiable."""
        if self.plain:
            return vector
        placed: Tensor = _Place.apply(vector, self.places, self.size)  # type: ignore[no-untyped-call]
        return placed

    def tensors(self, arranged: Tensor) -> dict[str, Tensor]:
        """Per layer, the weights as the module runs with them; views."""
        pieces = zip(self.layout.layers, self._pieces(arranged), strict=True)
        return {layer.name: piece for layer, piece in pieces}

    def _pieces(self, arranged: Tensor) -> list[Tensor]:
        cut: tuple[Tensor, ...] = _Cut.apply(arranged, self._sizes)  # type: ignore[no-untyped-call]
        return [part.view(piece) for part, piece in zip(self.parts, cut, strict=True)]

    def _shape(self, layer: Layer) -> tuple[int, ...]:
        if not self._is_convolution(layer) or layer.name in self._unfilled:
            return layer.shape
        return _up(layer.shape[0], self._multiple), _up(layer.shape[1], self._multiple), *layer.shape[2:]

    def _is_convolution(self, layer: Layer) -> bool:
        return self._channels_last and layer.convolution

    def _cut(self, layer: Layer, tensor: Tensor) -> Tensor:
        return tensor[: layer.shape[0], : layer.shape[1]] if self._is_convolution(layer) else tensor


def arrange(runner: Runner, layout: Layout, execution: Execution, device: torch.device) -> Arrangement:
    """Have the runner compute this way; where the weights lie then."""
    convolutions = [layer.name.rpartition(".")[0] for layer in layout.layers if layer.convolution]
    runner.execute(execution, convolutions)
    unfilled = {f"{name}.weight" for name in runner.narrow}
    return Arrangement(layout, execution.channels_last, execution.channel_multiple, device, unfilled)


class _Place(torch.autograd.Function):
    """Scatter forward; backward a plain read, since every place is taken at most once."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return vector.new_zeros(size).index_put_((places,), vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None


class _Cut(torch.autograd.Function):
    """Split forward; backward the pieces' gradients are put together, once all of them are there."""

    @staticmethod
    def forward(ctx: Any, arranged: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return torch.split(arranged, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        side.join()
        return torch.cat(gradients), None


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
