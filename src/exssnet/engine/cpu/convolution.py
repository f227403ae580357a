"""Convolutions in channels-last memory format on a CPU, around a defect of oneDNN."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ONEDNN_BLOCK = 16  # channels


def channels_last(x: Tensor) -> Tensor:
    """The same in channels-last memory format."""
    return x.contiguous(memory_format=torch.channels_last)


def guard(module: nn.Module) -> None:
    """Have the module's convolutions computed without the defect."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _is_affected(layer):
            layer.__class__ = PointConv2d


def _is_affected(layer: nn.Conv2d) -> bool:
    """A convolution of single points with a stride and few channels.

    oneDNN computes such a weight's gradient in memory that is not its own (uxlfoundation/oneDNN#6035; oneDNN 3.12, as
    in torch 2.13). Without a stride it does not.
    """
    plain = layer.padding in ((0, 0), "valid") and layer.kernel_size == (1, 1)
    return plain and layer.stride != (1, 1) and layer.in_channels // layer.groups < ONEDNN_BLOCK


class PointConv2d(nn.Conv2d):
    """A convolution of single points that looks only at those that its stride meets."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen = input[..., :: self.stride[0], :: self.stride[1]]
        return nn.functional.conv2d(seen, weight, bias, 1, 0, self.dilation, self.groups)
