"""Linear layers that pass over the weights that a mask leaves out.

A weight may come with its mask, a bit for every weight. Where a layer is large, few of its weights are in the mask and
PyTorch computes in one thread of a CPU, going through those few takes half the time of the dense product. Tensors stay
the same, results up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from exssnet.core.layout import Layout

LARGE = 100_000  # weights
FEW = 0.3  # share of them
BATCH = 32  # examples from which it pays


def fit(module: nn.Module) -> None:
    """Let the module's Linear layers see the masks of their weights."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = MaskedLinear


def masks_that_help(layout: Layout, masks: Iterable[Any], counts: Iterable[int]) -> list[Any]:
    """None instead of the mask of a layer whose dense product is as fast; `counts` are the weights in each mask."""
    layers = zip(layout.layers, masks, counts, strict=True)
    return [
        mask if len(layer.shape) == 2 and layer.size >= LARGE and count <= FEW * layer.size else None
        for layer, mask, count in layers
    ]


def with_masks(layout: Layout, weights: Iterable[Tensor], masks: Iterable[Any]) -> dict[str, Tensor]:
    """The weights by name, and with them their masks, which must be right for as long as the weights are used."""
    named = {}
    for layer, weight, mask in zip(layout.layers, weights, masks, strict=True):
        weight.mask = mask  # type: ignore[attr-defined]
        named[layer.name] = weight
    return named


class MaskedLinear(nn.Linear):
    """A Linear layer whose weight may come with a mask."""

    def forward(self, input: Tensor) -> Tensor:
        mask = getattr(self.weight, "mask", None)
        plain = input.ndim != 2 or len(input) < BATCH or input.dtype != self.weight.dtype
        if mask is None or plain or torch.get_num_threads() > 1:
            return super().forward(input)
        from exssnet.core.linear_numba import Product

        out: Tensor = Product.apply(input, self.weight, mask)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias
