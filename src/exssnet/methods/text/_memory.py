"""A share of each task's examples, and the replay of some of every earlier task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exssnet.data.tasks import Data, Task
from exssnet.data.text.tokens import shown
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Tensors, bits, check_whole
from exssnet.methods.text._base import AllClassText, TextSettings


@dataclass(frozen=True)
class TextReplaySettings(TextSettings):
    """`buffer`: share of a task's examples to keep. Every `every`th step replays `replayed` of each earlier task."""

    buffer: float = 0.01
    every: int = 10
    replayed: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, every=1, replayed=1)
        if self.buffer > 1:
            raise InputError(f"buffer is {self.buffer}: give the share of each task's examples to keep, at most 1")


class TextMemory(nn.Module):
    """Kept examples of each task, by its position in the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Tensors()  # "0.x": int32 [N, T, 2], "0.y": the task's own labels

    def keep(self, task: int, data: Data, rows: Tensor) -> None:
        """Keep these rows of a task."""
        rows = rows.to(data.device)
        self.kept.update({f"{task}.x": data.examples(rows), f"{task}.y": data.labels[rows].clone()})

    def draw(self, task: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Some examples of a task, none of them twice; all of them if it has fewer."""
        x, y = self.kept[f"{task}.x"], self.kept[f"{task}.y"]
        rows = torch.randperm(len(y), generator=generator, device=generator.device)[:count].to(y.device)
        return shown(x[rows]), y[rows]

    def bits(self) -> int:
        return bits(self.kept.values())


class TextReplay(AllClassText):
    """Every few steps, learn some kept examples of each earlier task with the batch.

    The published programs mix them with the batch and take a step for each 8 examples. The loop has one step a batch:
    here the 8 of each task weigh as much in it as the batch does.
    """

    settings_type = TextReplaySettings
    settings: TextReplaySettings
    steps: Tensor

    def prepare(self) -> None:
        super().prepare()
        self.memory = TextMemory()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def replays(self) -> bool:
        """Count a step; whether it replays."""
        self.steps += 1
        return bool(self.tasks) and int(self.steps) % self.settings.every == 0

    def earlier(self, batch: Batch) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Some examples and labels of each earlier task."""
        for task in range(len(self.tasks)):
            yield task, *self.memory.draw(task, self.settings.replayed, batch.generator)

    def loss(self, batch: Batch) -> Tensor:
        loss = self.new_loss(batch)
        if self.replays():
            for task, x, labels in self.earlier(batch):
                loss = loss + self.old_loss(x, labels, task)
        return loss

    def end_task(self, task: Task) -> None:
        self.memory.keep(len(self.tasks), task.train, self.chosen(task))
        super().end_task(task)

    def chosen(self, task: Task) -> Tensor:
        """The rows to keep of a task: a random share."""
        return torch.randperm(len(task.train), generator=self.generator("kept", task.name))[: self.room(task)]

    def room(self, task: Task) -> int:
        """How many examples of a task are kept."""
        return max(1, round(self.settings.buffer * len(task.train)))

    def storage(self) -> dict[str, int]:
        return super().storage() | {"memory_bits": self.memory.bits()}
