"""One vector for all masked weights: which slice of it belongs to which layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """A masked weight tensor of the module and its position in the flat vector."""

    name: str
    shape: tuple[int, ...]
    fan_in: int
    start: int
    convolution: bool = False  # an ungrouped 2-D convolution, whose order of memory may be chosen

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

    @property
    def names(self) -> frozenset[str]:
        return frozenset(layer.name for layer in self.layers)

    def slices(self, vector: Tensor) -> list[Tensor]:
        """Per layer, its flat slice of the vector; views, so gradients flow back into one vector."""
        return list(torch.split(vector, [layer.size for layer in self.layers]))

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Per layer name, the slice in the layer's own shape; views."""
        pieces = zip(self.layers, self.slices(vector), strict=True)
        return {layer.name: piece.view(layer.shape) for layer, piece in pieces}

    def vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `tensors`: a new vector."""
        return torch.cat([tensors[layer.name].reshape(-1) for layer in self.layers])
