"""Transforms of whole batches on the device, without per-image Python or synchronization with the host.

A transform takes inputs as stored (uint8 images or floats) and a generator. Random transforms draw only from that
generator and do nothing without one, so one pipeline serves training and evaluation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional


class Transform(Protocol):
    """Maps a batch to a batch of the same shape."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor: ...

    def to(self, device: str | torch.device) -> Self:
        """The same transform with its constants on another device."""
        ...


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Transforms in sequence."""

    steps: tuple[Transform, ...] = ()

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        for step in self.steps:
            x = step(x, generator)
        return x

    def to(self, device: str | torch.device) -> Pipeline:
        return Pipeline(tuple(step.to(device) for step in self.steps))


@dataclass(frozen=True, eq=False)
class Normalize:
    """`(x · scale - mean) / std` per channel, in float32."""

    scale: float
    mean: Tensor  # [C, 1, 1], or a scalar
    std: Tensor

    @classmethod
    def channels(cls, scale: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Normalize:
        return cls(scale, torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1))

    @classmethod
    def unit(cls) -> Normalize:
        """Bytes 0..255 to 0..1, for any shape."""
        return cls(1 / 255, torch.tensor(0.0), torch.tensor(1.0))

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return (x.float() * self.scale - self.mean) / self.std

    def to(self, device: str | torch.device) -> Normalize:
        return Normalize(self.scale, self.mean.to(device), self.std.to(device))


@dataclass(frozen=True)
class RandomCrop:
    """Pad with zeros (black, so before normalization) and crop the original size at a random offset."""

    padding: int

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return x
        count, channels, height, width = x.shape
        corner = self.draw(count, generator)
        rows = corner[0] + torch.arange(height, device=x.device)  # [B, H]
        columns = corner[1] + torch.arange(width, device=x.device)  # [B, W]
        image = torch.arange(count, device=x.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
        padded = functional.pad(x, [self.padding] * 4)
        return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Offsets of the crops in the padded images: top and left, [2, count, 1]."""
        return torch.randint(2 * self.padding + 1, (2, count, 1), generator=generator, device=generator.device)

    def to(self, device: str | torch.device) -> RandomCrop:
        return self


@dataclass(frozen=True)
class HorizontalFlip:
    """Flip each image horizontally with probability one half."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return x
        return torch.where(self.draw(len(x), generator).view(-1, 1, 1, 1), x.flip(-1), x)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Images to flip, bool [count]."""
        return torch.rand(count, generator=generator, device=generator.device) < 0.5

    def to(self, device: str | torch.device) -> HorizontalFlip:
        return self


@dataclass(frozen=True, eq=False)
class Permute:
    """Permute pixels, the same way in all channels."""

    order: Tensor  # int64 [pixels]: output pixel j is input pixel order[j]

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return x.reshape(len(x), -1, len(self.order))[..., self.order].reshape(x.shape)

    def to(self, device: str | torch.device) -> Permute:
        return Permute(self.order.to(device))


@dataclass(frozen=True)
class Rotate:
    """Rotate every image counter-clockwise about its centre by a fixed angle; bilinear, black outside."""

    degrees: float

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.degrees % 360 == 0:
            return x
        count, _, height, width = x.shape
        cosine, sine = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        # Source of the output at (u, v) from the centre, v downwards. In grid_sample's units (half
        # a side) the off-diagonal terms carry the aspect ratio.
        u = (torch.arange(width, device=x.device) + 0.5) * (2 / width) - 1
        v = ((torch.arange(height, device=x.device) + 0.5) * (2 / height) - 1).view(-1, 1)
        across = cosine * u - sine * (height / width) * v
        down = sine * (width / height) * u + cosine * v
        grid = torch.stack((across, down), dim=-1).expand(count, -1, -1, -1)  # [B, H, W, 2]
        return functional.grid_sample(x.float(), grid, mode="bilinear", align_corners=False)

    def to(self, device: str | torch.device) -> Rotate:
        return self
