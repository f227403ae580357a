"""All tasks at once, as if they had never come one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from exssnet.data.tasks import Data, Task
from exssnet.data.tensors import TensorData, joined
from exssnet.data.text.states import StatesData
from exssnet.errors import InputError
from exssnet.methods.base import Batch, JointMethod
from exssnet.methods.shared.dense import Dense


class Multitask(JointMethod, Dense):
    """Train one network on the examples of all tasks together: the bound for learning them in turn."""

    name = "multitask"
    remembers = True

    def together(self, tasks: Sequence[Task]) -> Task:
        """All tasks as one, whose labels are positions among the outputs."""
        self._names = [task.name for task in tasks]
        held = [task.validation for task in tasks if task.validation is not None]
        validation = self._joined(held) if held else None
        return replace(tasks[-1], name="all", train=self._joined([task.train for task in tasks]), validation=validation)

    def _joined(self, parts: Sequence[Data]) -> Data:
        pairs = zip(parts, self.outputs_of.slices, strict=True)
        labels = [part.labels + own.start for part, own in pairs]
        states = [part for part in parts if isinstance(part, StatesData)]
        if len(states) == len(parts):
            return StatesData.joined(states, labels, self.outputs_of.size)
        in_memory = [part for part in parts if isinstance(part, TensorData)]
        if len(in_memory) < len(parts):
            raise InputError("multitask joins the tasks' examples: it needs data in memory")
        return joined(in_memory, labels, self.outputs_of.size)

    def loss(self, batch: Batch) -> Tensor:
        outputs = self.outputs(batch.x)
        batch.logits = outputs.masked_fill(~self.rivals[batch.y], -float("inf"))
        return self.old_loss(outputs, batch.y)

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        out: Tensor = self.network(x, training=training)
        return out

    def end_task(self, task: Task) -> None:
        self.tasks = self._names
