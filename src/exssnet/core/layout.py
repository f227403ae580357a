"""One vector for all masked weights: which slice of it belongs to which layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """A masked weight tensor of the module and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    fan_in: int
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """The layers in module order. Masks, scores and weights of a network are vectors of length `size`."""

    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        return self.layers[-1].stop if self.layers else 0

    def slices(self, vector: Tensor) -> list[Tensor]:
        """Per layer, its flat slice of the vector; views, so gradients flow back into one vector."""
        return list(torch.split(vector, [layer.size for layer in self.layers]))

    def tensors(self, vector: Tensor, *, channels_last: bool = False) -> dict[str, Tensor]:
        """Per layer name, the slice in the layer's own shape; views.

        With `channels_last` the slices of 2-D convolutions hold their weights in that order of memory.
        """
        pieces = zip(self.layers, self.slices(vector), strict=True)
        if not channels_last:
            return {layer.name: piece.view(layer.shape) for layer, piece in pieces}
        return {layer.name: _from_channels_last(piece, layer.shape) for layer, piece in pieces}

    def places(self, channels_last: bool) -> Tensor:
        """Where each weight lies in a vector whose convolutions are in channels-last order (int32 [size])."""
        orders = torch.arange(self.size, dtype=torch.int32)
        if channels_last:
            orders = torch.cat([t.reshape(-1) for t in self.tensors(orders, channels_last=True).values()])
        return orders

    def vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `tensors`: a new vector."""
        return torch.cat([tensors[layer.name].reshape(-1) for layer in self.layers])


def _from_channels_last(piece: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    out, channels, height, width = shape
    return piece.view(out, height, width, channels).permute(0, 3, 1, 2)
