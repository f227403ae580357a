"""Averaged gradient episodic memory (Chaudhry et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet import randomness
from exssnet.data.tasks import Task
from exssnet.methods.base import Batch
from exssnet.methods.replay._memory import Replay

BATCH = 1000


def projected(gradient: Tensor, reference: Tensor) -> Tensor:
    """The gradient without its part against the reference, so that a step along it does not raise that loss."""
    against = (gradient @ reference).clamp(max=0)
    return gradient - against / (reference @ reference).clamp(min=1e-30) * reference


class AveragedGem(Replay):
    """Take out of each step what would raise the loss on examples drawn from a memory."""

    name = "agem"

    def loss(self, batch: Batch) -> Tensor:
        self._batch = batch
        return self.new_loss(batch)

    def after_backward(self) -> None:
        if self.tasks:
            old = self.recall(self._batch)
            loss = self.old_loss(self.outputs(old.x), old.labels)
            (reference,) = torch.autograd.grad(loss, [self.network.weights])
            assert self.network.weights.grad is not None
            self.network.weights.grad.copy_(projected(self.network.weights.grad, reference))

    def end_task(self, task: Task) -> None:
        """Only now: the reference is of earlier tasks alone."""
        assert self.memory is not None
        data, draw = task.train, randomness.generator(self.seed, "memory", task.name, device=task.train.device)
        for index in torch.split(torch.arange(len(data), device=data.device), BATCH):
            self.memory.add(data.examples(index), data.labels[index] + self.own.start, draw)
        super().end_task(task)
