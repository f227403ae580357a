"""Learning without forgetting (Li and Hoiem, 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exssnet.data.tasks import Task
from exssnet.methods.base import Batch, check_positive
from exssnet.methods.shared.dense import Dense, DenseSettings


@dataclass(frozen=True)
class LwfSettings(DenseSettings):
    """`strength` weighs the distillation, at this temperature."""

    strength: float = 1.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "strength", "temperature")


def distillation(outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """−Σ p log q over the batch's mean, p and q the softmax of targets and outputs divided by the temperature."""
    p = torch.softmax(targets / temperature, 1)
    return -(p * torch.log_softmax(outputs / temperature, 1)).sum(1).mean()


class LearningWithoutForgetting(Dense):
    """On the new examples, answer for earlier tasks as the network did before."""

    name = "lwf"
    settings_type = LwfSettings
    settings: LwfSettings
    keeps = ("teacher", "teacher_buffers")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teacher = self.network.start.clone()  # the network as the last task left it
        self.teacher_buffers = {name: b.clone() for name, b in self.network.buffers.items()}

    def loss(self, batch: Batch) -> Tensor:
        loss = self.new_loss(batch)
        if not self.tasks:
            return loss
        with torch.no_grad():
            before = self.network.run(batch.x, training=False, weights=self.teacher, buffers=self.teacher_buffers)
        kept = [distillation(self.seen[:, o], before[:, o], self.settings.temperature) for o in self.earlier()]
        return loss + self.settings.strength * torch.stack(kept).sum()

    def earlier(self) -> list[slice]:
        """The outputs to hold: each earlier task's, or all of them together where they are trained together."""
        own = self.outputs_of.slices[: len(self.tasks)]
        return own if self.head == "task" else [slice(0, max(outputs.stop for outputs in own))]

    def stored(self) -> Sequence[str]:
        return ()  # between tasks the teacher is the network itself

    def end_task(self, task: Task) -> None:
        self.teacher = self.network.weights.detach().clone()
        self.teacher_buffers = {name: b.clone() for name, b in self.network.buffers.items()}
        super().end_task(task)
