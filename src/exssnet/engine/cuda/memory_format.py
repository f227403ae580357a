"""The memory format in which a module runs on a GPU: 2-D convolutions channels-last, with a multiple of 8 channels.

A padded vector holds their weights so, with zeros where channels are padded. Scores, masks and the weights themselves
stay in the layout's plain format.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor

from exssnet.core.layout import Layer, Layout
from exssnet.engine.cuda import streams

CHANNEL_MULTIPLE = 8


class PaddedFormat:
    """Where each weight of a layout is in the padded vector. `narrow`: convolutions whose channels are not padded."""

    def __init__(
        self, layout: Layout, device: torch.device, narrow: Collection[str] = (), multiple: int = CHANNEL_MULTIPLE
    ) -> None:
        self.layout = layout
        self._narrow, self._multiple = narrow, multiple
        self._shapes = [self._shape(layer) for layer in layout.layers]
        self._sizes = [prod(shape) for shape in self._shapes]
        self.size = sum(self._sizes)
        self.plain = not any(layer.convolution for layer in layout.layers)  # the two formats are the same
        order = torch.arange(self.size, dtype=torch.int32)
        pieces = zip(layout.layers, self._pieces(order), strict=True)
        real = [piece[: layer.shape[0], : layer.shape[1]] if layer.convolution else piece for layer, piece in pieces]
        self.positions = torch.cat([piece.reshape(-1) for piece in real]).to(device)  # int32 [size of the layout]

    def padded(self, vector: Tensor) -> Tensor:
        """A layout's vector in this format; differentiable."""
        if self.plain:
            return vector
        placed: Tensor = _Pad.apply(vector, self.positions, self.size)  # type: ignore[no-untyped-call]
        return placed

    def tensors(self, padded: Tensor) -> dict[str, Tensor]:
        """Per layer, the weights as the module runs with them; views."""
        pieces = zip(self.layout.layers, self._pieces(padded), strict=True)
        return {layer.name: piece for layer, piece in pieces}

    def _pieces(self, padded: Tensor) -> list[Tensor]:
        cut: tuple[Tensor, ...] = _Cut.apply(padded, self._sizes)  # type: ignore[no-untyped-call]
        layers = zip(cut, self.layout.layers, self._shapes, strict=True)
        return [_view(piece, shape, layer.convolution) for piece, layer, shape in layers]

    def _shape(self, layer: Layer) -> tuple[int, ...]:
        if not layer.convolution or layer.name in self._narrow:
            return layer.shape
        return _up(layer.shape[0], self._multiple), _up(layer.shape[1], self._multiple), *layer.shape[2:]


def _view(piece: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    if not channels_last:
        return piece.view(shape)
    out, channels, height, width = shape
    return piece.view(out, height, width, channels).permute(0, 3, 1, 2)


class _Pad(torch.autograd.Function):
    """Scatter forward; backward a plain read, since every position is written at most once."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, positions: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(positions)
        return vector.new_zeros(size).index_put_((positions,), vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return gradients[0][positions], None, None


class _Cut(torch.autograd.Function):
    """Split forward; backward the pieces' gradients are put together, once all of them are there."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return torch.split(padded, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        streams.join()
        return torch.cat(gradients), None


def ordered(x: Tensor) -> Tensor:
    """In channels-last format."""
    return x.contiguous(memory_format=torch.channels_last)


def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for a tensor in channels-last format."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
