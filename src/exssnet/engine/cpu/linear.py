"""Linear layers that pass over the weights that a mask leaves out.

A weight may come with its mask, a bit for every weight. Where a layer is large, few of its weights are in the mask and
PyTorch computes in one thread of a CPU, going through those few is faster than the dense product
(`benchmarks/linear.py`). Tensors stay the same, results up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from exssnet.core.bank import pack
from exssnet.core.layout import Layout
from exssnet.engine.cpu.memory import Numbers

LARGE = 100_000  # weights
FEW = 0.3  # share of them
TOGETHER = 64  # examples that are computed together
FILLED = 0.8  # share of the places for them that must be taken


def fit(module: nn.Module) -> None:
    """Let the module's Linear layers see the masks of their weights."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = MaskedLinear


def packed(mask: Tensor) -> Numbers:
    """A mask (bool vector) in words of 64 bits, the first weight's lowest."""
    bits = pack(mask).numpy()
    return np.pad(bits, (0, -len(bits) % 8)).view("<u8")


class Masked(NamedTuple):
    """What a weight may come with: its mask, and room where its gradient is wanted; that may be none."""

    bits: Numbers  # one for every weight that may not be zero
    room: Callable[[], Tensor | None] = lambda: None


def _helps(shape: Sequence[int], count: int) -> bool:
    """Whether the mask of a weight helps that has so many ones."""
    return len(shape) == 2 and prod(shape) >= LARGE and count <= FEW * prod(shape)


def masks_that_help(layout: Layout, masks: Iterable[Any], counts: Iterable[int]) -> list[Any]:
    """None instead of the mask of a layer whose dense product is as fast; `counts` are the weights in each mask."""
    layers = zip(layout.layers, masks, counts, strict=True)
    return [mask if _helps(layer.shape, count) else None for layer, mask, count in layers]


def pass_over_zeros(weights: Iterable[Tensor]) -> None:
    """Give weights that stay as they are the masks of what is not zero in them, where that helps."""
    of_use = [weight for weight in weights if weight.dtype == torch.float32 and _helps(weight.shape, 0)]
    if not of_use or of_use[0].device.type != "cpu" or torch.get_num_threads() > 1:
        return
    try:
        from exssnet.engine.cpu import linear_numba  # noqa: F401
    except ImportError:  # no numba, or one that does not fit this numpy
        return
    for weight in of_use:
        present = weight.reshape(-1) != 0
        if _helps(weight.shape, int(present.count_nonzero())):
            weight.masked = Masked(packed(present))  # type: ignore[attr-defined]


def with_masks(layout: Layout, weights: Iterable[Tensor], masks: Iterable[Masked | None]) -> dict[str, Tensor]:
    """The weights by name, and with them their masks, which must be right for as long as the weights are used."""
    named = {}
    for layer, weight, mask in zip(layout.layers, weights, masks, strict=True):
        weight.masked = mask  # type: ignore[attr-defined]
        named[layer.name] = weight
    return named


class MaskedLinear(nn.Linear):
    """A Linear layer whose weight may come with a mask."""

    def forward(self, input: Tensor) -> Tensor:
        masked = getattr(self.weight, "masked", None)
        if masked is None or not self._pays(input):
            return super().forward(input)
        from exssnet.engine.cpu.linear_numba import Product

        out: Tensor = Product.apply(input, self.weight, self.bias, masked)  # type: ignore[no-untyped-call]
        return out

    def _pays(self, input: Tensor) -> bool:
        single = input.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not single or input.ndim != 2 or torch.get_num_threads() > 1:
            return False
        places = -(-len(input) // TOGETHER) * TOGETHER
        return len(input) >= FILLED * max(places, 1)
