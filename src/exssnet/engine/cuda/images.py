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

from exssnet.engine.cuda.kernels import jit, launch

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


class Images:
    """Images of bytes [N, C, H, W] from which batches are made, in one launch each."""

    def __init__(self, images: Tensor) -> None:
        self._images = images

    def batch(
        self, rows: Tensor, table: Tensor, corners: Tensor | None = None, padding: int = 0,
        flipped: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The images in these rows: cut at their corners [2, rows, 1] from padded ones, mirrored, scaled by a table.

        `table` [C, 256] has the value of each byte in each channel.
        """
        count, shape = len(rows), self._images.shape[1:]
        out = torch.empty((count, *shape), device=rows.device)
        grid = (count, triton.cdiv(shape.numel(), BLOCK))
        launch(
            _batch, grid, self._images, rows, table, rows if corners is None else corners,
            rows if flipped is None else flipped, out, count, PADDING=-1 if corners is None else padding,
            FLIP=flipped is not None, CHANNELS=shape[0], HEIGHT=shape[1], WIDTH=shape[2], BLOCK=BLOCK,
        )  # fmt: skip
        return out
