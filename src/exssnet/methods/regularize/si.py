"""Synaptic intelligence (Zenke et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exssnet.data.tasks import Task
from exssnet.methods.base import Batch
from exssnet.methods.shared.dense import Dense, DenseSettings


@dataclass(frozen=True)
class SiSettings(DenseSettings):
    """`strength` weighs the penalty; `damping` is added to a weight's squared way before dividing by it."""

    strength: float = 100.0
    damping: float = 0.1


class SynapticIntelligence(Dense):
    """Hold weights back in proportion to what their way through earlier tasks took off the loss."""

    name = "si"
    settings_type = SiSettings
    settings: SiSettings
    importance: Tensor
    anchor: Tensor
    path: Tensor  # −∫ slope · d(weights), over this task
    last: Tensor  # weights at the last step
    slope: Tensor  # gradient at the last step

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        start = self.network.start
        for name in ("importance", "path", "slope"):
            self.register_buffer(name, torch.zeros_like(start))
        for name in ("anchor", "last"):
            self.register_buffer(name, start.clone())

    def loss(self, batch: Batch) -> Tensor:
        self._walk()  # the optimizer has stepped since the last gradient
        return self.new_loss(batch)

    def after_backward(self) -> None:
        weights = self.network.weights
        assert weights.grad is not None
        self.last.copy_(weights.detach())
        self.slope.copy_(weights.grad)  # of the task's loss alone
        weights.grad += 2 * self.settings.strength * self.importance * (weights.detach() - self.anchor)

    def stored(self) -> Iterable[Tensor]:
        return (self.importance,)  # between tasks the anchor is the network itself

    def _walk(self) -> None:
        self.path -= self.slope * (self.network.weights.detach() - self.last)
        self.last.copy_(self.network.weights.detach())

    def end_task(self, task: Task) -> None:
        self._walk()
        weights = self.network.weights.detach()
        gained = self.path / ((weights - self.anchor).square() + self.settings.damping)
        self.importance += gained.clamp(min=0)
        self.anchor = weights.clone()
        for moving in (self.path, self.slope):
            moving.zero_()
        super().end_task(task)
