"""Data in memory: one tensor for all tasks of a data set, each with its own list of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exssnet.core.engine import Engine
from exssnet.data.dataset import Split, digest_of
from exssnet.data.fused import FusedPipeline, fused
from exssnet.data.tasks import Data
from exssnet.data.transforms import Pipeline, Transform


class Shared:
    """A tensor with at most one copy per device, shared by all tasks."""

    def __init__(self, tensor: Tensor) -> None:
        self._copies = {tensor.device: tensor.contiguous()}  # the batch kernel requires it
        self.shape = tensor.shape

    def on(self, device: str | torch.device) -> Tensor:
        """The tensor on a device; the copy lives as long as this object."""
        device = torch.empty(0, device=device).device  # "cuda" and "cuda:0" are the same device
        if device not in self._copies:
            self._copies.setdefault(device, next(iter(self._copies.values())).to(device))
        return self._copies[device]


class TensorData(Data):
    """Rows of a shared tensor with a task's labels; batches are gathered and transformed on the device."""

    capturable = True

    def __init__(
        self, inputs: Shared, rows: Tensor, labels: Tensor, classes: int, transform: Transform | None = None,
        warp: Transform | None = None,
    ) -> None:  # fmt: skip
        """`warp` transforms the inputs of this task; `transform`, after it, those of all tasks."""
        self.labels = labels
        self.classes = classes
        self.shape = tuple(inputs.shape[1:])
        self._shared = inputs
        self._inputs = inputs.on(labels.device)
        self._rows = rows.to(labels.device)
        self._transform = (transform or Pipeline()).to(labels.device)
        self._warp = None if warp is None else warp.to(labels.device)
        self._fused: FusedPipeline | None = None

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        rows = self._rows[index]
        if self._fused is not None:
            return self._fused(rows, generator), self.labels[index]
        return self.shown(self.examples(index), generator), self.labels[index]

    def examples(self, index: Tensor) -> Tensor:
        stored = self._inputs.index_select(0, self._rows[index])
        return stored if self._warp is None else self._warp(stored, None)

    def shown(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        x = self._transform(examples, generator)
        return x.float() if x.dtype == torch.uint8 else x

    def use(self, engine: Engine) -> TensorData:
        if self._warp is None:
            self._fused = fused(engine.images(self._inputs), self._inputs, self._transform)
        return self

    def to(self, device: str | torch.device) -> TensorData:
        labels = self.labels.to(device)
        return TensorData(self._shared, self._rows, labels, self.classes, self._transform, self._warp)


def joined(parts: Sequence[TensorData], labels: Sequence[Tensor], classes: int) -> TensorData:
    """Join the examples of several tasks, with these labels."""
    everything = [part.examples(torch.arange(len(part), device=part.device)) for part in parts]
    rows = torch.arange(sum(map(len, parts)))
    return TensorData(Shared(torch.cat(everything)), rows, torch.cat(list(labels)), classes, parts[0]._transform)


class TensorSplit(Split):
    """A decoded split: inputs [N, ...] as stored (uint8 or float32), and how to augment and scale them."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        augment: tuple[Transform, ...] = (),
        normalize: Transform | None = None,
        digest: str | None = None,
    ) -> None:
        self.labels = labels
        self.digest = digest or digest_of(images, labels)
        self.augment = augment
        self.normalize = normalize
        self._shared = Shared(images)

    @property
    def images(self) -> Tensor:
        return self._shared.on("cpu")

    def select(self, rows: Tensor, labels: Tensor, classes: int, warp: tuple[Transform, ...] = ()) -> TensorData:
        scale = (self.normalize,) if self.normalize else ()
        of_task = Pipeline(warp) if warp else None
        return TensorData(self._shared, rows, labels, classes, Pipeline((*self.augment, *scale)), of_task)
