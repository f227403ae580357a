"""Convolutions of few channels on a GPU, in bfloat16 and channels-last order: forward, and both gradients.

The libraries' kernels are made for channels by the hundred. With twenty, most of a tile is empty and the choice among
them is a matter of luck: over the 20 convolutions of a ResNet-18 of width 20 they took two thirds of a step. These are
implicit matrix products with tiles that fit, sums in one fixed order, and no search: the same bits every time.

A convolution weight [O, I, kh, kw] lies in memory as [O, kh, kw, I], an image [B, C, H, W] as [B, H, W, C].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Callable[[Callable[..., Any]], Any] = triton.jit


@jit
def _gather(
    images: tl.tensor, weight: tl.tensor, out: tl.tensor, rows: tl.tensor, height: tl.tensor, width: tl.tensor,
    of_height: tl.tensor, of_width: tl.tensor, outputs: tl.tensor, CHANNELS: tl.constexpr, BY_OUTPUT: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BY_TAP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """out[position, n] = Σ over taps and channels of images[seen at that tap, c] · weight[n, tap, c].

    Forward, `images` is the input and n an output channel; backward, it is the gradient of the output and n an input
    channel: then a tap is looked at from the other side, and only where the stride meets it. `height` and `width` are
    those of `images`, `of_height` and `of_width` those of `out`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    x, y, image = row % of_width, row // of_width % of_height, row // (of_width * of_height)
    blocks: tl.constexpr = (CHANNELS + DEPTH - 1) // DEPTH
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for step in range(KERNEL * KERNEL * blocks):
        tap = step // blocks
        c = step % blocks * DEPTH + tl.arange(0, DEPTH)
        if BACKWARD:
            down, right = y + PADDING - tap // KERNEL, x + PADDING - tap % KERNEL
            meets = (down % STRIDE == 0) & (right % STRIDE == 0) & (down >= 0) & (right >= 0)
            down, right = down // STRIDE, right // STRIDE
        else:
            down, right = y * STRIDE + tap // KERNEL - PADDING, x * STRIDE + tap % KERNEL - PADDING
            meets = (down >= 0) & (right >= 0)
        seen = meets & (down < height) & (right < width) & (row < rows)
        pixel = (image * height + down) * width + right
        a = tl.load(
            images + pixel[:, None] * CHANNELS + c[None, :], mask=seen[:, None] & (c < CHANNELS)[None, :], other=0.0
        )
        b = tl.load(
            weight + n[None, :] * BY_OUTPUT + tap * BY_TAP + c[:, None] * BY_CHANNEL,
            mask=(c < CHANNELS)[:, None] & (n < outputs)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total)
    inside = (row < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out + row[:, None].to(tl.int64) * outputs + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@jit
def _correlate(
    images: tl.tensor, inflow: tl.tensor, parts: tl.tensor, rows: tl.tensor, height: tl.tensor, width: tl.tensor,
    of_height: tl.tensor, of_width: tl.tensor, steps: tl.tensor, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """parts[p, o, tap, c] = Σ over the p-th share of the positions of inflow[position, o] · images[seen there, c]."""
    tiles: tl.constexpr = (CHANNELS + INPUTS - 1) // INPUTS
    tap = tl.program_id(0) // tiles
    c = tl.program_id(0) % tiles * INPUTS + tl.arange(0, INPUTS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * DEPTH + tl.arange(0, DEPTH)
        x, y, image = row % of_width, row // of_width % of_height, row // (of_width * of_height)
        down, right = y * STRIDE + tap // KERNEL - PADDING, x * STRIDE + tap % KERNEL - PADDING
        there = row < rows
        seen = there & (down >= 0) & (right >= 0) & (down < height) & (right < width)
        pixel = (image * height + down) * width + right
        a = tl.load(inflow + row[None, :] * OUT + o[:, None], mask=there[None, :] & (o < OUT)[:, None], other=0.0)
        b = tl.load(
            images + pixel[:, None] * CHANNELS + c[None, :], mask=seen[:, None] & (c < CHANNELS)[None, :], other=0.0
        )
        total = tl.dot(a, b, total)
    size: tl.constexpr = KERNEL * KERNEL * CHANNELS
    at = (part * OUT + o[:, None]) * size + tap * CHANNELS + c[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=(o < OUT)[:, None] & (c < CHANNELS)[None, :])


@jit
def _sum(
    parts: tl.tensor, out: tl.tensor, size: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, COUNT: tl.constexpr
) -> None:
    """The sum of the parts, in one order."""
    at, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COUNT)
    inside = (part < count)[:, None] & (at < size)[None, :]
    values = tl.load(parts + part[:, None] * size + at[None, :], mask=inside, other=0.0)
    tl.store(out + at, tl.sum(values, 0).to(out.dtype.element_ty), mask=at < size)


class Tile(NamedTuple):
    """A program's share: rows and columns of the result, what it multiplies at a time, and how it runs."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    parts: int = 1  # of a weight's gradient


# The rules below follow the best tiles of benchmarks/convolution.py --sweep on an H200.


def gather_tile(rows: int, channels: int, outputs: int) -> Tile:
    """How a convolution of so many positions, and its gradient by the input, is cut up."""
    tall = 128 if rows >= 16384 else 64
    columns = 32 if outputs <= 32 or rows <= 1024 else 64
    depth = min(max(triton.next_power_of_2(channels), 16), 128)
    return Tile(tall, columns, depth, warps=8 if tall == 128 and columns == 64 else 4)


def correlate_tile(rows: int, channels: int, outputs: int, taps: int) -> Tile:
    """How the gradient of a weight is cut up; the more positions, the more parts they are shared out to."""
    tall = 32 if outputs <= 32 else 64
    columns = 16 if channels <= 16 else 64 if 32 < channels <= 64 and taps > 1 else 32
    depth = 64 if taps == 1 or channels <= 16 else 32 if rows >= 4096 and channels <= 64 else 128
    parts = 1 if rows <= 1024 and taps > 1 else min(128, triton.next_power_of_2(-(-rows // 512)))
    return Tile(tall, columns, depth, warps=4 if depth == 128 or taps == 1 else 2, parts=parts)


def forward(x: Tensor, weight: Tensor, stride: int, padding: int, tile: Tile | None = None) -> Tensor:
    """The convolution of x [B, I, H, W] with a weight [O, I, k, k], both in channels-last order."""
    (count, channels, height, width), (outputs, _, kernel, _) = x.shape, weight.shape
    of_height, of_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    out = _empty(x, (count, outputs, of_height, of_width))
    rows = count * of_height * of_width
    tile = tile or gather_tile(rows, channels, outputs)
    _gather[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns))](
        x, weight, out, rows, height, width, of_height, of_width, outputs, CHANNELS=channels,
        BY_OUTPUT=kernel * kernel * channels, BY_CHANNEL=1, BY_TAP=channels, KERNEL=kernel, STRIDE=stride,
        PADDING=padding, BACKWARD=False, ROWS=tile.rows, OUTPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def input_gradient(
    inflow: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int, tile: Tile | None = None
) -> Tensor:
    """dL/dx [B, I, height, width], from the gradient of the output."""
    (count, channels, of_height, of_width), (_, inputs, kernel, _) = inflow.shape, weight.shape
    out = _empty(inflow, (count, inputs, height, width))
    rows = count * height * width
    tile = tile or gather_tile(rows, channels, inputs)
    _gather[(triton.cdiv(rows, tile.rows), triton.cdiv(inputs, tile.columns))](
        inflow, weight, out, rows, of_height, of_width, height, width, inputs, CHANNELS=channels, BY_OUTPUT=1,
        BY_CHANNEL=kernel * kernel * inputs, BY_TAP=inputs, KERNEL=kernel, STRIDE=stride, PADDING=padding,
        BACKWARD=True, ROWS=tile.rows, OUTPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def weight_gradient(
    inflow: Tensor, x: Tensor, kernel: int, stride: int, padding: int, tile: Tile | None = None
) -> Tensor:
    """dL/dw [O, I, k, k], from the gradient of the output."""
    (count, channels, height, width), (_, outputs, of_height, of_width) = x.shape, inflow.shape
    rows = count * of_height * of_width
    tile = tile or correlate_tile(rows, channels, outputs, kernel * kernel)
    steps = triton.cdiv(rows, tile.parts * tile.depth)
    shares = triton.cdiv(rows, steps * tile.depth)
    out = _empty(x, (outputs, channels, kernel, kernel))
    parts = out if shares == 1 else torch.empty(shares * out.numel(), device=x.device)
    grid = (kernel * kernel * triton.cdiv(channels, tile.columns), triton.cdiv(outputs, tile.rows), shares)
    _correlate[grid](
        x, inflow, parts, rows, height, width, of_height, of_width, steps, CHANNELS=channels, OUT=outputs,
        KERNEL=kernel, STRIDE=stride, PADDING=padding, OUTPUTS=tile.rows, INPUTS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if shares > 1:
        _sum[(triton.cdiv(out.numel(), 64),)](
            parts, out, out.numel(), shares, BLOCK=64, COUNT=triton.next_power_of_2(shares)
        )
    return out


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
