"""The examples of a task, their scaling, and the defaults of batch size and epochs."""

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
    """Find the scaling of inputs; None for examples in memory, which the caller scales."""
    if found.recipe["kind"] == "tensor":
        return None
    if (
        files.material(found.recipe) == files.IMAGES
    ):  # the same for all tasks, so that an input can be given to any of them
        for card in cards:
            recipe = card["recipe"]
            if files.material(recipe) == files.IMAGES and recipe["shape"] == found.recipe["shape"] and card["scaling"]:
                return dict(card["scaling"])
    return files.scaling(found.inputs[train])


def parts(found: files.Labelled, scaling: Mapping[str, Any] | None) -> Callable[[Tensor], Data]:
    """Select examples by row. Images stay uint8 and are scaled batch by batch."""
    classes = len(found.classes)
    if scaling is not None and found.inputs.dtype == torch.uint8 and found.inputs.ndim == 4:
        pictures = Shared(found.inputs)
        scale = Normalize.channels(scaling["scale"], tuple(scaling["mean"]), tuple(scaling["std"]))
        return lambda rows: TensorData(pictures, rows, found.labels[rows], classes, scale)
    inputs = Shared(prepared(found.inputs, scaling))
    return lambda rows: TensorData(inputs, rows, found.labels[rows], classes)


def cut(rows: Tensor, labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split rows into those without a fraction of each class, and that fraction."""
    left, taken = files.hold_out(labels[rows], share, seed)
    return rows[left], rows[taken]


def usual_batch(examples: int) -> int:
    """Default batch size: 64, or less if an epoch would have fewer than 20 steps; a mask needs hundreds."""
    return max(8, min(64, 1 << max(examples // 20, 1).bit_length() - 1))


def usual_epochs(shape: Sequence[int], examples: int, batch: int) -> tuple[int, int]:
    """Default epochs: 15 per phase, and up to 50 for tables of few rows, whose epochs have few steps."""
    steps = max(1, math.ceil(examples / max(batch, 1)))
    each = max(15, min(50, math.ceil(STEPS / steps))) if len(shape) == 1 else 15
    return each, each
