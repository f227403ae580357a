"""Learning without forgetting (Li and Hoiem, 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exssnet.data.tasks import Task
from exssnet.methods.base import Batch
from exssnet.methods.shared.dense import Dense, DenseSettings
from exssnet.methods.shared.teacher import Teacher


@dataclass(frozen=True)
class LwfSettings(DenseSettings):
    """`strength` weighs the distillation, at this temperature."""

    strength: float = 1.0
    temperature: float = 2.0


def distillation(outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """−Σ p log q over the batch's mean, p and q the softmax of targets and outputs divided by the temperature."""
    p = torch.softmax(targets / temperature, 1)
    return -(p * torch.log_softmax(outputs / temperature, 1)).sum(1).mean()


class LearningWithoutForgetting(Dense):
    """On the new examples, answer for earlier tasks as the network did before."""

    name = "lwf"
    settings_type = LwfSettings
    settings: LwfSettings

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teacher = Teacher(self.network)  # between tasks the network itself: nothing more is stored

    def loss(self, batch: Batch) -> Tensor:
        loss = self.new_loss(batch)
        if not self.tasks:
            return loss
        before, heat = self.teacher.outputs(self.network, batch.x), self.settings.temperature
        each = torch.stack([distillation(self.seen[:, old], before[:, old], heat) for old in self.earlier()])
        distilled: Tensor = self.settings.strength * each.sum()
        return loss + distilled

    def earlier(self) -> list[slice]:
        """The outputs to hold: each earlier task's, or all of them together where they are trained together."""
        own = self.outputs_of.slices[: len(self.tasks)]
        return own if self.head == "task" else [slice(0, max(outputs.stop for outputs in own))]

    def end_task(self, task: Task) -> None:
        self.teacher.follow(self.network)
        super().end_task(task)
