"""Weights and scores at the start: drawn on the CPU from addressed seeds, so every device starts alike."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn

from exssnet import randomness
from exssnet.core.layout import Layer, Layout


def signed_constant(layout: Layout, seed: int) -> Tensor:
    """w = ±√2/√fan_in, the sign random: what edge-popup selects well from."""
    draw = randomness.generator(seed, "weights")
    return torch.cat([_signs(layer, draw) * math.sqrt(2 / layer.fan_in) for layer in layout.layers])


def _signs(layer: Layer, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (layer.size,), generator=draw).float().mul_(2).sub_(1)


def hashed_signs(layout: Layout, seed: int) -> Tensor:
    """The same with signs that are bits of SHAKE-256 of the seed: they are this for every version of every library.

    A stored model has no copy of its first weights and must find them again in ten years.
    """
    stream = hashlib.shake_256(f"exssnet weights {seed}".encode()).digest((layout.size + 7) // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=layout.size, bitorder="little")
    signs = torch.from_numpy(bits).float().mul_(2).sub_(1)
    sizes = torch.tensor([layer.size for layer in layout.layers])
    scale = torch.tensor([math.sqrt(2 / layer.fan_in) for layer in layout.layers], dtype=torch.float64).float()
    return signs * scale.repeat_interleave(sizes)


def fresh_scores(layout: Layout, seed: int, task: str) -> Tensor:
    """s uniform in ±1/√fan_in (Kaiming uniform with a = √5), drawn for each task."""
    draw = randomness.generator(seed, "scores", task)
    scores = torch.empty(layout.size, dtype=torch.float32)  # whatever the default is: a start is the same everywhere
    for layer, part in zip(layout.layers, layout.slices(scores), strict=True):
        bound = 1 / math.sqrt(layer.fan_in)
        nn.init.uniform_(part, -bound, bound, generator=draw)
    return scores


def fresh_head(like: Tensor, classes: int, fan_in: int, seed: int, task: str, name: str) -> Tensor:
    """A private head's weight or bias for `classes` outputs, drawn as PyTorch draws a Linear layer's."""
    shape = (classes, *like.shape[1:])
    draw = randomness.generator(seed, "head", task, name)
    bound = 1 / math.sqrt(fan_in)
    return nn.init.uniform_(torch.empty(shape, dtype=torch.float32), -bound, bound, generator=draw).to(like.dtype)


DRAWN = {"signed": signed_constant, "hashed": hashed_signs}  # ways to draw a network's first weights
