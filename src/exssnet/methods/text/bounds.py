"""What the rivals that train an encoder are measured against: an encoder for each task, and one for all at once.

`individual` and `multitask` are the same for networks over a frozen encoder: their bounds are other ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from exssnet.data.tasks import Data, Task
from exssnet.data.text.tokens import TokenData
from exssnet.methods.base import Batch, JointMethod
from exssnet.methods.text._base import AllClassText
from exssnet.methods.text._own import OwnParts


class TextIndividual(OwnParts):
    """Fine-tune a copy of the encoder for each task: the bound for methods that share one."""

    name = "text-individual"


class TextMultitask(JointMethod, AllClassText):
    """Fine-tune the encoder on the texts of all tasks together: the bound for learning them in turn."""

    name = "text-multitask"
    heads = ("masked-test",)
    remembers = True

    def together(self, tasks: Sequence[Task]) -> Task:
        """All tasks as one, whose labels are positions among the outputs."""
        self._names = [task.name for task in tasks]
        held = [task.validation for task in tasks if task.validation is not None]
        validation = self._joined(held) if len(held) == len(tasks) else None
        return replace(tasks[-1], name="all", train=self._joined([task.train for task in tasks]), validation=validation)

    def _joined(self, parts: Sequence[Data]) -> TokenData:
        tokens = [part for part in parts if isinstance(part, TokenData)]
        labels = [self.columns(at)[part.labels] for at, part in enumerate(tokens)]
        return TokenData.joined(tokens, labels, len(self.numbers))

    def loss(self, batch: Batch) -> Tensor:
        batch.logits = self.all_outputs(batch.x, training=True)
        return self.engine.cross_entropy(batch.logits, batch.y)

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        return self.all_outputs(x, training=training)

    def end_task(self, task: Task) -> None:
        self.tasks = self._names
