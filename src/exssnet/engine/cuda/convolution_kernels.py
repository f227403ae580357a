"""Convolutions of few channels on a GPU, in channels-last order: forward, and both gradients.

The libraries' kernels are made for channels by the hundred. With twenty, most of a tile is empty and the choice among
them is a matter of luck: over the 20 convolutions of a ResNet-18 of width 20 they took two thirds of a step. These are
implicit matrix products with tiles that fit, sums in one fixed order, and no search: the same bits every time. Numbers
are bfloat16, or float32 without the shortcut of TF32.

An image [B, C, H, W] lies in memory as [B, H, W, C], a weight [O, I, k, k] as [O, k, k, I]. So what a row of the kernel
sees of an image, its taps with all their channels, is one stretch of memory: a span. Products run over a
few long spans instead of many short taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.engine.cuda.kernels import jit, launch
from exssnet.engine.cuda.memory_format import empty


@jit
def _gather(
    images: tl.tensor, weight: tl.tensor, out: tl.tensor, count: tl.tensor, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OF_HEIGHT: tl.constexpr, OF_WIDTH: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    BY_OUTPUT: tl.constexpr, BY_CHANNEL: tl.constexpr, BY_TAP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """out[position, n] = Σ over the taps and channels of images[seen at that tap, c] · weight[n, tap, c].

    Forward, `images` is the input and n an output channel. Backward, it is the gradient of the output and n an input
    channel; taps are taken in reverse, and with a stride only some taps meet a position, so
    positions are done class by class, the third axis of the grid. HEIGHT and WIDTH are those of `images`, OF_HEIGHT
    and OF_WIDTH those of `out`; they are constants, so that dividing by them is cheap.
    """
    first_y, first_x = 0, 0  # of this class of positions, and how far step_size they are
    step_size: tl.constexpr = STRIDE if BACKWARD else 1
    if step_size > 1:
        first_y, first_x = tl.program_id(2) // step_size, tl.program_id(2) % step_size
    down, across = (OF_HEIGHT - first_y + step_size - 1) // step_size, (OF_WIDTH - first_x + step_size - 1) // step_size
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = first_x + row % across * step_size
    y = first_y + row // across % down * step_size
    image = row // (across * down)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)

    # taps of this class: from the last to the first, every step_size-th
    if BACKWARD:
        least_y, least_x = (first_y + PADDING) % STRIDE, (first_x + PADDING) % STRIDE
        tall, wide = (KERNEL - least_y + STRIDE - 1) // STRIDE, (KERNEL - least_x + STRIDE - 1) // STRIDE
        from_y, from_x, tap_step = least_y + STRIDE * (tall - 1), least_x + STRIDE * (wide - 1), -STRIDE
        top, left = (y + PADDING - from_y) // STRIDE, (x + PADDING - from_x) // STRIDE  # without a rest
    else:
        tall, wide = KERNEL, KERNEL
        from_y, from_x, tap_step = 0, 0, 1
        top, left = y * STRIDE - PADDING, x * STRIDE - PADDING
    blocks = (wide * CHANNELS + DEPTH - 1) // DEPTH
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for step in range(tall * blocks):
        j = step // blocks
        k = step % blocks * DEPTH + tl.arange(0, DEPTH)
        tap_x, c = k // CHANNELS, k % CHANNELS
        seen_y = (row < count * down * across) & (top + j >= 0) & (top + j < HEIGHT)
        seen_x = (left[:, None] + tap_x[None, :] >= 0) & (left[:, None] + tap_x[None, :] < WIDTH)
        inside = tap_x < wide
        start = ((image * HEIGHT + top + j) * WIDTH + left) * CHANNELS
        a = tl.load(images + start[:, None] + k[None, :], mask=seen_y[:, None] & seen_x & inside[None, :], other=0.0)
        at = ((from_y + tap_step * j) * KERNEL + from_x + tap_step * tap_x) * BY_TAP + c * BY_CHANNEL
        b = tl.load(weight + at[:, None] + n[None, :] * BY_OUTPUT, mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = ((image * OF_HEIGHT + y) * OF_WIDTH + x).to(tl.int64) * OUT
    there = (row < count * down * across)[:, None] & (n < OUT)[None, :]
    tl.store(out + at[:, None] + n[None, :], total.to(out.dtype.element_ty), mask=there)


@jit
def _correlate(
    images: tl.tensor, inflow: tl.tensor, parts: tl.tensor, rows: tl.tensor, steps: tl.tensor, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, OF_HEIGHT: tl.constexpr, OF_WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """parts[p, o, tap, c] = Σ over the p-th share of the positions of inflow[position, o] · images[seen there, c]."""
    size: tl.constexpr = KERNEL * CHANNELS  # of a span
    blocks: tl.constexpr = (size + SPAN - 1) // SPAN
    j = tl.program_id(0) // blocks
    k = tl.program_id(0) % blocks * SPAN + tl.arange(0, SPAN)
    tap_x = k // CHANNELS
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    total = tl.zeros([OUTPUTS, SPAN], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * DEPTH + tl.arange(0, DEPTH)
        x, y, image = row % OF_WIDTH, row // OF_WIDTH % OF_HEIGHT, row // (OF_WIDTH * OF_HEIGHT)
        top, left = y * STRIDE - PADDING + j, x * STRIDE - PADDING
        there = row < rows
        seen_y = there & (top >= 0) & (top < HEIGHT)
        seen_x = (left[:, None] + tap_x[None, :] >= 0) & (left[:, None] + tap_x[None, :] < WIDTH)
        start = ((image * HEIGHT + top) * WIDTH + left) * CHANNELS
        a = tl.load(inflow + row[None, :] * OUT + o[:, None], mask=there[None, :] & (o < OUT)[:, None], other=0.0)
        b = tl.load(
            images + start[:, None] + k[None, :], mask=seen_y[:, None] & seen_x & (k < size)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    at = ((part * OUT + o[:, None]) * KERNEL + j) * size + k[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=(o < OUT)[:, None] & (k < size)[None, :])


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


def gather_tile(rows: int, span: int, outputs: int) -> Tile:
    """How a convolution of `rows` positions, and its gradient by the input, is cut up."""
    columns = 32 if outputs <= 32 or rows <= 1024 else 64
    depth = max(triton.next_power_of_2(span), 16)
    if rows >= 65536:
        return Tile(128, columns, min(depth, 64), warps=8, stages=2)
    if rows >= 16384:
        return Tile(128, columns, min(depth, 64), stages=3 if columns == 64 else 2)
    return Tile(64, columns, min(depth, 128))


def correlate_tile(rows: int, span: int, outputs: int, kernel: int) -> Tile:
    """How the gradient of a weight is cut up: positions into enough parts to fill the GPU."""
    tile = Tile(32 if outputs <= 32 else 64, min(max(triton.next_power_of_2(span), 16), 64), 64)
    tiles = kernel * triton.cdiv(span, tile.columns) * triton.cdiv(outputs, tile.rows)
    wanted = (384 if rows >= 65536 else 128) // tiles
    return tile._replace(parts=1 << max(wanted.bit_length() - 1, 0))


def _fitting(x: Tensor, tile: Tile) -> Tile:
    """In float32 products are not the matrix units' work, and a program holds a tile's depth in its registers."""
    return tile._replace(depth=min(tile.depth, 32)) if x.dtype == torch.float32 else tile


def forward(x: Tensor, weight: Tensor, stride: int, padding: int, tile: Tile | None = None) -> Tensor:
    """The convolution of x [B, I, H, W] with a weight [O, I, k, k], both in channels-last order."""
    (count, channels, height, width), (outputs, _, kernel, _) = x.shape, weight.shape
    of_height, of_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    out = empty(x, (count, outputs, of_height, of_width))
    rows = count * of_height * of_width
    tile = tile or _fitting(x, gather_tile(rows, kernel * channels, outputs))
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns))
    launch(
        _gather, grid, x, weight, out, count, height, width, of_height, of_width, outputs, channels,
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
    out = empty(inflow, (count, inputs, height, width))
    rows = count * triton.cdiv(height, stride) * triton.cdiv(width, stride)  # of the largest class of positions
    tile = tile or _fitting(inflow, gather_tile(rows, kernel * channels, inputs))
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(inputs, tile.columns), stride * stride)
    launch(
        _gather, grid, inflow, weight, out, count, of_height, of_width, height, width, inputs, channels, BY_OUTPUT=1,
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
    tile = tile or _fitting(x, correlate_tile(rows, kernel * channels, outputs, kernel))
    steps = triton.cdiv(rows, tile.parts * tile.depth)
    shares = triton.cdiv(rows, steps * tile.depth)
    out = empty(x, (outputs, channels, kernel, kernel))
    parts = out if shares == 1 else torch.empty(shares * out.numel(), device=x.device)
    grid = (kernel * triton.cdiv(kernel * channels, tile.columns), triton.cdiv(outputs, tile.rows), shares)
    launch(
        _correlate, grid, x, inflow, parts, rows, steps, height, width, of_height, of_width, CHANNELS=channels,
        OUT=outputs, KERNEL=kernel, STRIDE=stride, PADDING=padding, OUTPUTS=tile.rows, SPAN=tile.columns,
        DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if shares > 1:
        size, count = out.numel(), triton.next_power_of_2(shares)
        launch(_sum, (triton.cdiv(size, 64),), parts, out, size, shares, BLOCK=64, COUNT=count)
    return out
