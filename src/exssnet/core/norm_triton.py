"""Batch normalisation on a GPU together with what stands around it: a sum with another branch, and ReLU.

Values are rows of channels in channels-last order. Forward, the statistics come with the convolution
(`convolution_triton.forward`); backward, the two sums that the gradient needs are one launch, and the gradient is
another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.core.jit_triton import jit
from exssnet.core.sums_triton import add_up

BLOCK = 2048
PROGRAMS = 256  # of the sums, at most


@jit
def _moments(sums: tl.tensor, c: tl.tensor, count: tl.tensor, epsilon: tl.tensor, CHANNELS: tl.constexpr) -> tl.tensor:
    """Mean, variance and 1 / standard deviation of the channels c."""
    mean = tl.load(sums + c) / count
    variance = tl.maximum(tl.load(sums + CHANNELS + c) / count - mean * mean, 0.0)
    return mean, variance, 1 / tl.sqrt(variance + epsilon)


@jit
def _normalise(
    y: tl.tensor, residual: tl.tensor, sums: tl.tensor, running_mean: tl.tensor, running_var: tl.tensor,
    out: tl.tensor, rows: tl.tensor, epsilon: tl.tensor, momentum: tl.tensor, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out = relu(normalised y + residual); the first program also moves the running statistics."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * CHANNELS
    count = rows.to(tl.float32)
    mean, _, scale = _moments(sums, at % CHANNELS, count, epsilon, CHANNELS)
    value = (tl.load(y + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        c = tl.arange(0, WIDTH)
        new_mean, variance, _unread = _moments(sums, c % CHANNELS, count, epsilon, CHANNELS)
        before_mean, before_var = tl.load(running_mean + c % CHANNELS), tl.load(running_var + c % CHANNELS)
        unbiased = variance * (count / (count - 1))
        tl.store(running_mean + c, before_mean + momentum * (new_mean - before_mean), mask=c < CHANNELS)
        tl.store(running_var + c, before_var + momentum * (unbiased - before_var), mask=c < CHANNELS)


@jit
def _slope(inflow: tl.tensor, z: tl.tensor, at: tl.tensor, inside: tl.tensor, RELU: tl.constexpr) -> tl.tensor:
    """The gradient of what ReLU is given."""
    g = tl.load(inflow + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(tl.load(z + at, mask=inside, other=0.0) > 0, g, 0.0)
    return g


@jit
def _sums(
    inflow: tl.tensor, z: tl.tensor, y: tl.tensor, sums: tl.tensor, parts: tl.tensor, finished: tl.tensor,
    slopes: tl.tensor, rows: tl.tensor, steps: tl.tensor, epsilon: tl.tensor, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """slopes[0] = Σ g and slopes[1] = Σ g · normalised y per channel, g the gradient of what ReLU is given."""
    c = tl.arange(0, WIDTH)
    mean, _, scale = _moments(sums, c % CHANNELS, rows.to(tl.float32), epsilon, CHANNELS)
    one, two = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (c < CHANNELS)[None, :]
        at = row[:, None] * CHANNELS + c[None, :]
        g = _slope(inflow, z, at, inside, RELU)
        normal = (tl.load(y + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        one += tl.sum(g, 0)
        two += tl.sum(g * normal, 0)
    add_up(one, two, parts, finished, slopes, tl.program_id(0), tl.num_programs(0), c, CHANNELS, WIDTH)


@jit
def _backward(
    inflow: tl.tensor, z: tl.tensor, y: tl.tensor, sums: tl.tensor, slopes: tl.tensor, out: tl.tensor,
    passed: tl.tensor, rows: tl.tensor, epsilon: tl.tensor, CHANNELS: tl.constexpr, RELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of y, and in `passed` that of the other branch."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * CHANNELS
    count = rows.to(tl.float32)
    c = at % CHANNELS
    mean, _, scale = _moments(sums, c, count, epsilon, CHANNELS)
    g = _slope(inflow, z, at, inside, RELU)
    normal = (tl.load(y + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
    slope = g - tl.load(slopes + c) / count - normal * (tl.load(slopes + CHANNELS + c) / count)
    tl.store(out + at, (slope * scale).to(out.dtype.element_ty), mask=inside)
    if passed is not None:
        tl.store(passed + at, g.to(passed.dtype.element_ty), mask=inside)


def normalise(
    y: Tensor, sums: Tensor, residual: Tensor | None, running_mean: Tensor, running_var: Tensor, epsilon: float,
    momentum: float, relu: bool,
) -> Tensor:  # fmt: skip
    """relu(normalised y [+ residual]), from the channels' sums; moves the running statistics."""
    out, channels = torch.empty_like(y), y.shape[1]
    _normalise[(triton.cdiv(y.numel(), BLOCK),)](
        y, residual, sums, running_mean, running_var, out, y.numel() // channels, epsilon, momentum, CHANNELS=channels,
        WIDTH=triton.next_power_of_2(channels), RELU=relu, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


def gradient(
    inflow: Tensor, z: Tensor, y: Tensor, sums: Tensor, epsilon: float, relu: bool, finished: Tensor, passes: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of y, and where it passes to another branch, of that; `finished` is a counter at zero."""
    channels, rows = y.shape[1], y.numel() // y.shape[1]
    width = triton.next_power_of_2(channels)
    tall = max(4096 // width, 1)
    steps = triton.cdiv(rows, tall * PROGRAMS)
    programs = triton.cdiv(rows, tall * steps)
    parts, slopes = torch.empty((programs, 2, channels), device=y.device), torch.empty_like(sums)
    _sums[(programs,)](
        inflow, z, y, sums, parts, finished, slopes, rows, steps, epsilon, CHANNELS=channels, WIDTH=width, RELU=relu,
        ROWS=tall, num_warps=8,
    )  # fmt: skip
    out, passed = torch.empty_like(y), torch.empty_like(y) if passes else None
    _backward[(triton.cdiv(y.numel(), BLOCK),)](
        inflow, z, y, sums, slopes, out, passed, rows, epsilon, CHANNELS=channels, RELU=relu, BLOCK=BLOCK, num_warps=8
    )
    return out, passed
