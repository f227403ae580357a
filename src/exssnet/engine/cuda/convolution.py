"""2-D convolutions as a GPU computes them fastest: padded with channels, or by kernels of our own.

A runner's own copy of a module is changed: its convolutions change class. Tensors stay the same, results up to
rounding.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from exssnet.engine.cuda import streams
from exssnet.engine.cuda.memory_format import empty, ordered

TYPES = (torch.bfloat16, torch.float32)
WIDEST = 192  # channels of a convolution that our kernels do


def fit(module: nn.Module, names: Collection[str], kernels: bool, widest: int = WIDEST) -> set[str]:
    """Change the named convolutions; the names of those that are not padded."""
    narrow = set()
    for name in names:
        layer = module.get_submodule(name)
        if kernels and is_narrow(layer, widest):
            layer.__class__ = NarrowConv2d
            narrow.add(name)
        else:
            layer.__class__ = PaddedConv2d
    return narrow


def is_narrow(layer: nn.Module, widest: int) -> bool:
    """Whether our kernels can and should do a convolution: few channels, and nothing out of the ordinary."""
    if not isinstance(layer, nn.Conv2d) or layer.bias is not None or isinstance(layer.padding, str):
        return False
    pairs = (layer.kernel_size, layer.stride, layer.padding)
    even = all(pair[0] == pair[1] for pair in pairs) and layer.dilation == (1, 1)
    return even and layer.padding_mode == "zeros" and max(layer.in_channels, layer.out_channels) <= widest


class PaddedConv2d(nn.Conv2d):
    """A convolution whose weight comes with more channels than it has, all zero."""

    def forward(self, input: Tensor) -> Tensor:
        missing = self.weight.shape[1] - input.shape[1]
        if missing:
            input = nn.functional.pad(input, (0, 0, 0, 0, 0, missing))
        bias = self.bias
        if bias is not None:
            bias = nn.functional.pad(bias, (0, self.weight.shape[0] - len(bias)))
        out: Tensor = self._conv_forward(input, self.weight, bias)
        return out[:, : self.out_channels]


class NarrowConv2d(nn.Conv2d):
    """A convolution of few channels."""

    def forward(self, input: Tensor) -> Tensor:
        if len(self.weight) != self.out_channels:  # a part of a shared head: a slice's gradient cannot wait to join
            return super().forward(input)
        stride, padding = int(self.stride[0]), int(self.padding[0])
        out: Tensor = convolve(input.to(self.weight.dtype), self.weight, stride, padding)
        return out


# The three operations are opaque to torch.compile, which fuses what stands around them.


@custom_op("exssnet::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution of x [B, I, H, W] with a weight [O, I, k, k]."""
    if _ours(x, weight):
        from exssnet.engine.cuda import convolution_kernels as kernels

        return kernels.forward(ordered(x), ordered(weight), stride, padding)
    return ordered(torch.conv2d(x, weight, stride=stride, padding=padding))


@custom_op("exssnet::convolve_input", mutates_args=())
def convolve_input(inflow: Tensor, weight: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    """The gradient by the input."""
    if _ours(x, weight):
        from exssnet.engine.cuda import convolution_kernels as kernels

        height, width = x.shape[2:]
        return kernels.input_gradient(ordered(inflow), ordered(weight), height, width, stride, padding)
    return ordered(_backward(inflow, x, weight, stride, padding, [True, False, False])[0])


@custom_op("exssnet::convolve_weight", mutates_args=())
def convolve_weight(inflow: Tensor, weight: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    """The gradient by the weight; in a captured step on the second stream, until `streams.join`."""
    if _ours(x, weight):
        from exssnet.engine.cuda import convolution_kernels as kernels

        inflow, x = ordered(inflow), ordered(x)
        with streams.concurrently(weight, inflow, x) as kept:
            return kept(kernels.weight_gradient(inflow, x, weight.shape[2], stride, padding))
    return ordered(_backward(inflow, ordered(x), weight, stride, padding, [False, True, False])[1])


@convolve.register_fake
def _(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    size = ((length + 2 * padding - weight.shape[2]) // stride + 1 for length in x.shape[2:])
    return empty(x, (len(x), len(weight), *size))


@convolve_input.register_fake
def _(inflow: Tensor, weight: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return empty(inflow, tuple(x.shape))


@convolve_weight.register_fake
def _(inflow: Tensor, weight: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return empty(inflow, tuple(weight.shape))


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
    x, weight, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, inflow: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    of_input = convolve_input(inflow, weight, x, ctx.stride, ctx.padding) if wanted[0] else None
    of_weight = convolve_weight(inflow, weight, x, ctx.stride, ctx.padding) if wanted[1] else None
    return of_input, of_weight, None, None


convolve.register_autograd(_gradients, setup_context=_remember)


def _ours(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernels take it: they count positions in 32 bits."""
    widest = x.numel() // x.shape[1] * max(weight.shape[:2])
    return x.is_cuda and x.dtype in TYPES and widest < 2**31 and find_spec("triton") is not None


def _backward(
    inflow: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    geometry = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        inflow, x, weight, None, *geometry, wanted
    )
    return found
