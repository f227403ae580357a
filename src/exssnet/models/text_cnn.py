"""The paper's text network: three parallel convolutions over token states, the maximum over time, and a head.

An input is one tensor [tokens, width + 1]: the token states, and a last channel that is 1 where there is a token and 0
where there is padding. So the lengths are part of the input. Loops, graphs of fixed shapes, memories of examples and
`Model` pass on one tensor as they do for images, and padding more changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from exssnet.errors import InputError

WIDTHS = (3, 4, 5)  # tokens that a filter sees
FILTERS = 200  # of each width
SHORTEST = max(WIDTHS)  # shorter texts are padded with zeros to it
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


class TextCNN(nn.Module):
    """Convolutions of widths 3, 4 and 5 over token states [tokens, width + 1], without biases."""

    def __init__(
        self, input_shape: Sequence[int], classes: int, width: float = FILTERS, activation: str = "tanh"
    ) -> None:
        super().__init__()
        if len(input_shape) != 2 or input_shape[1] < 2:
            raise InputError(
                f"text-cnn cannot take inputs of shape {tuple(input_shape)}: give token states (tokens, width + 1)"
            )
        if not 1 <= width < math.inf or width != int(width):
            raise InputError(f"width {width} of text-cnn: give a whole number of filters, {FILTERS} in the paper")
        if activation not in ACTIVATIONS:
            raise InputError(f"activation is '{activation}': choose one of {', '.join(ACTIVATIONS)}")
        filters = int(width)
        self.activation = activation
        self.convolutions = nn.ModuleList(
            nn.Conv1d(input_shape[1] - 1, filters, tokens, bias=False) for tokens in WIDTHS
        )
        self.head = nn.Linear(len(WIDTHS) * filters, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < SHORTEST:
            x = functional.pad(x, (0, 0, 0, SHORTEST - x.shape[1]))
        present = x[..., -1] > 0.5  # [B, T]
        states = x[..., :-1].masked_fill(~present[..., None], 0.0)
        at_least = torch.arange(x.shape[1], device=x.device) < SHORTEST
        seen = present | at_least  # short texts are as long as the widest filter
        activate = ACTIVATIONS[self.activation]
        # both activations rise, so the maximum may come first: T times fewer values to activate
        best = [activate(self._best(layer, states, seen)) for layer in self.convolutions]
        logits: Tensor = self.head(torch.cat(best, 1))
        return logits

    def _best(self, layer: nn.Module, states: Tensor, seen: Tensor) -> Tensor:
        """The largest response of every filter over the windows that end in the text, [B, filters]."""
        if type(layer) is not nn.Conv1d:  # a method has put something around it, such as a gate for each filter
            gated: Tensor = layer(states.transpose(1, 2))
            whole = seen[:, seen.shape[1] - gated.shape[2] :]
            return gated.masked_fill(~whole[:, None], -torch.inf).amax(2)
        weight = layer.weight
        whole = seen[:, weight.shape[2] - 1 :]  # windows by their last token
        if self.training and weight.requires_grad and not states.is_cuda and not states.requires_grad:
            found: Tensor = _BestWindows.apply(weight, states, whole)  # type: ignore[no-untyped-call]
            return found
        return _responses(weight, states, whole).amax(1)


def relu(input_shape: Sequence[int], classes: int, width: float = FILTERS) -> TextCNN:
    """The network with the activation of the published code."""
    return TextCNN(input_shape, classes, width, "relu")


def _responses(weight: Tensor, states: Tensor, whole: Tensor) -> Tensor:
    """Of every filter at every window [B, windows, filters]; -inf where a window reaches beyond the text.

    As a 2-D convolution over images of one row, since states are such images in the order `channels_last`: a 1-D
    convolution would copy them into another one, and takes a quarter longer on a CPU.
    """
    rows = states[:, None].permute(0, 3, 1, 2)  # [B, width, 1, T], a view
    filters = weight[:, :, None].contiguous(memory_format=torch.channels_last)
    found = functional.conv2d(rows, filters).permute(0, 2, 3, 1).squeeze(1)
    return found.masked_fill(~whole[..., None], -torch.inf)


class _BestWindows(torch.autograd.Function):
    """The maximum over time on a CPU.

    Each text passes a gradient to one window of each filter. So the gradient of the weights is a weighted sum of as
    many windows as there are texts and filters, where a convolution's own backward sums over all of them.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, states: Tensor, whole: Tensor) -> Tensor:
        best, where = _responses(weight, states, whole).max(1)
        ctx.save_for_backward(states, where)
        ctx.tokens = weight.shape[2]
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        states, where = ctx.saved_tensors
        texts, length, width = states.shape
        first = where + length * torch.arange(texts)[:, None]  # of each window, among all tokens: [B, filters]
        windows, factors = first.t().contiguous(), gradient.t().contiguous()
        tokens = states.reshape(-1, width)
        sums = [
            functional.embedding_bag(windows + offset, tokens, per_sample_weights=factors, mode="sum")
            for offset in range(ctx.tokens)
        ]
        return torch.stack(sums, 1).transpose(1, 2), None, None  # [filters, width, window]
