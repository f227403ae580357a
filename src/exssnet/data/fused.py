"""The pipelines of the usual image data sets in one launch, where an engine has a kernel for them.

One after the other these transforms are some fifteen launches on tensors so small that the launches are all they cost.
The draws and the results are those of the plain transforms, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet.core.engine import ImageKernel
from exssnet.data.transforms import HorizontalFlip, Normalize, Pipeline, RandomCrop, Transform


class FusedPipeline:
    """Gathers, crops, flips and scales stored images."""

    def __init__(
        self, kernel: ImageKernel, images: Tensor, crop: RandomCrop | None, flip: HorizontalFlip | None,
        normalize: Normalize,
    ) -> None:  # fmt: skip
        self._kernel, self._crop, self._flip = kernel, crop, flip
        every = torch.arange(256, dtype=torch.uint8, device=images.device).view(256, 1, 1, 1)
        scaled = normalize(every.expand(256, images.shape[1], 1, 1), None)
        self._table = scaled.view(256, -1).t().contiguous()  # [channels, 256]

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        corners = flipped = None
        if generator is not None and self._crop is not None:
            corners = self._crop.draw(len(rows), generator)
        if generator is not None and self._flip is not None:
            flipped = self._flip.draw(len(rows), generator)
        padding = 0 if self._crop is None else self._crop.padding
        return self._kernel.batch(rows, self._table, corners, padding, flipped)


def fused(kernel: ImageKernel | None, images: Tensor, transform: Transform) -> FusedPipeline | None:
    """The fused form of a pipeline for these images; None where there is none."""
    if kernel is None or not isinstance(transform, Pipeline):
        return None
    match transform.steps:
        case (Normalize() as normalize,):
            return FusedPipeline(kernel, images, None, None, normalize)
        case (HorizontalFlip() as flip, Normalize() as normalize):
            return FusedPipeline(kernel, images, None, flip, normalize)
        case (RandomCrop() as crop, HorizontalFlip() as flip, Normalize() as normalize):
            return FusedPipeline(kernel, images, crop, flip, normalize)
        case _:
            return None
