"""iCaRL (Rebuffi et al., 2017): exemplars chosen by herding, distillation, and the nearest mean as the answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exssnet.data.tasks import Data, Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, bits
from exssnet.methods.replay._memory import ReplaySettings
from exssnet.methods.shared.dense import Dense
from exssnet.methods.shared.teacher import Teacher

BATCH = 500


def herd(features: Tensor, count: int) -> Tensor:
    """The order in which examples [N, F] are taken so that the mean of those taken stays nearest to the mean of all."""
    mean, total = features.mean(0), torch.zeros_like(features[0])
    left, order = torch.ones(len(features), dtype=torch.bool, device=features.device), []
    for number in range(1, min(count, len(features)) + 1):
        away = (mean - (total + features) / number).square().sum(1)
        order.append(away.masked_fill(~left, torch.inf).argmin())
        left[order[-1]] = False
        total = total + features[order[-1]]
    return torch.stack(order)


class Icarl(Dense):
    """Keep herded exemplars, distil the old outputs, and answer with the nearest mean of exemplars.

    The paper trains on new examples and exemplars in one heap. Here, as in the other methods with a memory, every batch
    of new examples comes with as many exemplars. Validation while a task is learned uses the outputs, not the means.
    """

    name = "icarl"
    settings_type = ReplaySettings
    settings: ReplaySettings
    heads = ("task", "masked-test")  # a mean for every class needs outputs of every class
    remembers = True
    exemplars: Tensor  # as stored, class by class in the order of herding
    positions: Tensor  # of their classes among the outputs
    means: Tensor  # [O, F]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.outline is not None
        capacity = self.settings.capacity(self.outline.examples)
        if capacity < self.outputs_of.size:
            raise InputError(
                f"buffer is {self.settings.buffer}, {capacity} examples for {self.outputs_of.size} classes: "
                f"iCaRL needs one for each, give a larger --buffer"
            )
        self.register_buffer("exemplars", torch.zeros(0))
        self.register_buffer("positions", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("means", torch.zeros(0))
        self.teacher = Teacher(self.network)

    def loss(self, batch: Batch) -> Tensor:
        loss = self.binary(batch.x, batch.y + self.own.start)
        batch.logits = self.seen[:, self.own]
        if not self.tasks:
            return loss
        uniform = torch.rand(len(batch), dtype=torch.float64, device=batch.x.device, generator=batch.generator)
        drawn = (uniform * len(self.positions)).long()
        return loss + self.binary(batch.data.shown(self.exemplars[drawn], batch.generator), self.positions[drawn])

    def binary(self, x: Tensor, positions: Tensor) -> Tensor:
        """Every output on its own: the new classes learn the labels, the old ones what the network answered before."""
        self.seen = self.outputs(x)
        wanted = functional.one_hot(positions, self.outputs_of.size).to(self.seen.dtype)
        counted = self.rivals[positions]
        if self.tasks:
            before = self.teacher.outputs(self.network, x)
            old = slice(0, self.own.start)
            wanted = torch.cat([before[:, old].sigmoid(), wanted[:, old.stop :]], 1)
            counted = torch.cat([torch.ones_like(counted[:, old]), counted[:, old.stop :]], 1)
        each = functional.binary_cross_entropy_with_logits(self.seen, wanted, reduction="none")
        return (each * counted).sum() / counted.sum()

    def end_task(self, task: Task) -> None:
        assert self.outline is not None
        each = self.settings.capacity(self.outline.examples) // self.own.stop
        kept, positions = self._shortened(each)
        for label in range(task.train.classes):
            index = (task.train.labels == label).nonzero().view(-1)
            if len(index):
                chosen = index[herd(self._features(task.train, index), each)]
                kept.append(task.train.examples(chosen))
                positions.append(torch.full_like(chosen, self.own.start + label))
        self.exemplars, self.positions = torch.cat(kept), torch.cat(positions)
        self.means = self._means(task.train)
        self.teacher.follow(self.network)
        super().end_task(task)

    def logits(self, x: Tensor, task: str) -> Tensor:
        own = self.outputs_of.slices[self.tasks.index(task)]
        features = functional.normalize(self.network.features(x).float())
        return -torch.cdist(features, self.means[own]).square()

    def _shortened(self, each: int) -> tuple[list[Tensor], list[Tensor]]:
        """The first exemplars of every class so far."""
        classes = [(self.positions == position).nonzero().view(-1)[:each] for position in range(self.own.start)]
        return [self.exemplars[rows] for rows in classes], [self.positions[rows] for rows in classes]

    def _features(self, data: Data, index: Tensor) -> Tensor:
        pieces = [self.network.features(data.batch(part)[0]).float() for part in torch.split(index, BATCH)]
        return functional.normalize(torch.cat(pieces))

    def _means(self, data: Data) -> Tensor:
        """Per class the mean of its exemplars' features, under the network as it is now."""
        pieces = [self.network.features(data.shown(part)).float() for part in torch.split(self.exemplars, BATCH)]
        features = functional.normalize(torch.cat(pieces))
        of_class = functional.one_hot(self.positions, self.outputs_of.size).to(features.dtype)
        return functional.normalize(of_class.T @ features)

    def storage(self) -> dict[str, int]:
        return super().storage() | {"memory_bits": bits([self.exemplars, self.positions])}

    def stored(self) -> Iterable[Tensor]:
        return (self.means,)  # between tasks the teacher is the network itself
