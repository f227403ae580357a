"""What a task is learned with: its examples, how they are scaled, and how long it is trained where nobody says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exssnet.data.files import labelled as files
from exssnet.data.tasks import Data
from exssnet.data.tensors import Shared, TensorData
from exssnet.data.transforms import Normalize
from exssnet.store.routes.scaled_routing import prepared

STEPS = 1500  # in each phase of a small table: a checkerboard of 900 rows needs as many


def fitting_scaling(found: files.Labelled, train: Tensor, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How the inputs are scaled: None for examples in memory, which the caller has scaled."""
    if found.recipe["kind"] == "tensor":
        return None
    if files.material(found.recipe) == files.IMAGES:  # alike for all tasks: an input can be shown to any of them
        for card in cards:
            recipe = card["recipe"]
            if files.material(recipe) == files.IMAGES and recipe["shape"] == found.recipe["shape"] and card["scaling"]:
                return dict(card["scaling"])
    return files.scaling(found.inputs[train])


def parts(found: files.Labelled, scaling: Mapping[str, Any] | None) -> Callable[[Tensor], Data]:
    """Some of the examples, by row. Pictures stay bytes, and are scaled batch by batch."""
    classes = len(found.classes)
    if scaling is not None and found.inputs.dtype == torch.uint8 and found.inputs.ndim == 4:
        pictures = Shared(found.inputs)
        scale = Normalize.channels(scaling["scale"], tuple(scaling["mean"]), tuple(scaling["std"]))
        return lambda rows: TensorData(pictures, rows, found.labels[rows], classes, scale)
    inputs = Shared(prepared(found.inputs, scaling))
    return lambda rows: TensorData(inputs, rows, found.labels[rows], classes)


def cut(rows: Tensor, labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Some of the rows, without a share of each class, and that share."""
    left, taken = files.hold_out(labels[rows], share, seed)
    return rows[left], rows[taken]


def usual_batch(examples: int) -> int:
    """64, or less where an epoch would have fewer than 20 steps: a mask needs hundreds of them."""
    return max(8, min(64, 1 << max(examples // 20, 1).bit_length() - 1))


def usual_epochs(shape: Sequence[int], examples: int, batch: int) -> tuple[int, int]:
    """15 of each, and up to 50 for a table of few rows: an epoch has few steps then, and costs next to nothing."""
    steps = max(1, math.ceil(examples / max(batch, 1)))
    each = max(15, min(50, math.ceil(STEPS / steps))) if len(shape) == 1 else 15
    return each, each
