"""Online elastic weight consolidation (Kirkpatrick et al., 2017; Schwarz et al., 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from exssnet.data.tasks import Data, Task
from exssnet.methods.base import Batch
from exssnet.methods.regularize._fisher import fisher_diagonal
from exssnet.methods.shared.dense import Dense, DenseSettings

NUMBERS = 2**22  # of the inputs in a batch: what a network remembers of them for its gradients is many times that


@dataclass(frozen=True)
class EwcSettings(DenseSettings):
    """`strength` weighs the penalty; `gamma` is what is left of the old importance after each task."""

    strength: float = 10_000.0
    gamma: float = 1.0


class OnlineEwc(Dense):
    """Hold weights back in proportion to the Fisher information that earlier tasks have in them."""

    name = "ewc-online"
    settings_type = EwcSettings
    settings: EwcSettings
    fisher: Tensor
    anchor: Tensor  # where the weights were after the last task

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("fisher", torch.zeros_like(self.network.start))
        self.register_buffer("anchor", self.network.start.clone())

    def loss(self, batch: Batch) -> Tensor:
        moved = self.network.weights - self.anchor
        penalty: Tensor = self.settings.strength / 2 * (self.fisher * moved.square()).sum()
        return self.new_loss(batch) + penalty

    def stored(self) -> Iterable[Tensor]:
        return (self.fisher,)  # between tasks the anchor is the network itself

    def end_task(self, task: Task) -> None:
        self.fisher = self.settings.gamma * self.fisher + self.information(task.train)
        self.anchor = self.network.weights.detach().clone()
        super().end_task(task)

    def information(self, data: Data) -> Tensor:
        """The diagonal of the empirical Fisher information: the mean over the examples of squared gradients."""
        trained = self.outputs_of.trained(len(self.tasks))
        total = torch.zeros_like(self.fisher)
        size = max(1, min(1000, NUMBERS // prod(data.shape)))
        for index in torch.split(torch.arange(len(data), device=data.device), size):
            x, y = data.batch(index)
            total += fisher_diagonal(self.network, x, y + (self.own.start - trained.start), trained)
        return total / len(data)
