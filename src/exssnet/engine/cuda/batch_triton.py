"""A batch of images in one launch: gather, crop, flip and scale, for the pipelines of the usual data sets.

One after the other these are some fifteen launches on tensors so small that the launches are all they cost. The draws
and the results are those of the plain transforms, bit for bit: scaling a byte is looked up in a table that the plain
transform made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.data.transforms import HorizontalFlip, Normalize, Pipeline, RandomCrop, Transform
from exssnet.engine.cuda.jit_triton import jit, launch

BLOCK = 1024


@jit
def _batch(
    images: tl.tensor, rows: tl.tensor, table: tl.tensor, corners: tl.tensor, flipped: tl.tensor, out: tl.tensor,
    count: tl.tensor, PADDING: tl.constexpr, FLIP: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One piece of one image. PADDING is −1 where nothing is cropped."""
    image = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size: tl.constexpr = CHANNELS * HEIGHT * WIDTH
    channel, y, x = at // (HEIGHT * WIDTH), at // WIDTH % HEIGHT, at % WIDTH
    if FLIP:
        x = tl.where(tl.load(flipped + image), WIDTH - 1 - x, x)
    if PADDING >= 0:
        y += tl.load(corners + image).to(tl.int32) - PADDING
        x += tl.load(corners + count + image).to(tl.int32) - PADDING
    row = tl.load(rows + image)
    seen = (at < size) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    byte = tl.load(images + row * size + channel * (HEIGHT * WIDTH) + y * WIDTH + x, mask=seen, other=0)
    value = tl.load(table + channel * 256 + byte.to(tl.int32), mask=at < size, other=0.0)
    tl.store(out + image.to(tl.int64) * size + at, value, mask=at < size)


class FusedBatch:
    """What `Pipeline` does with images of bytes, in one launch."""

    def __init__(
        self, images: Tensor, crop: RandomCrop | None, flip: HorizontalFlip | None, normalize: Normalize
    ) -> None:
        self._images, self._crop, self._flip = images, crop, flip
        every = torch.arange(256, dtype=torch.uint8, device=images.device).view(256, 1, 1, 1)
        scaled = normalize(every.expand(256, images.shape[1], 1, 1), None)
        self._table = scaled.view(256, -1).t().contiguous()  # [channels, 256]

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        count, shape = len(rows), self._images.shape[1:]
        out = torch.empty((count, *shape), device=rows.device)
        crop = None if generator is None else self._crop
        flip = None if generator is None else self._flip
        corners = rows if crop is None or generator is None else crop.draw(count, generator)
        flipped = rows if flip is None or generator is None else flip.draw(count, generator)
        grid = (count, triton.cdiv(shape.numel(), BLOCK))
        launch(
            _batch, grid, self._images, rows, self._table, corners, flipped, out, count,
            PADDING=-1 if crop is None else crop.padding,
            FLIP=flip is not None, CHANNELS=shape[0], HEIGHT=shape[1], WIDTH=shape[2], BLOCK=BLOCK,
        )  # fmt: skip
        return out


def fused(images: Tensor, transform: Transform) -> FusedBatch | None:
    """The fused form of a pipeline for these images of bytes, or None where there is none."""
    if not isinstance(transform, Pipeline) or images.ndim != 4:
        return None
    match transform.steps:
        case (Normalize() as normalize,):
            return FusedBatch(images, None, None, normalize)
        case (HorizontalFlip() as flip, Normalize() as normalize):
            return FusedBatch(images, None, flip, normalize)
        case (RandomCrop() as crop, HorizontalFlip() as flip, Normalize() as normalize):
            return FusedBatch(images, crop, flip, normalize)
        case _:
            return None
