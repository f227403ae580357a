"""What the methods that train one text classifier have in common. A method adds its rule.

Outputs are the classes of all tasks, those that tasks share once. `masked-test` trains against all of them, as the
published programs do, `task` against the task's own; a test that names the task reads the task's own in either case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from exssnet import randomness
from exssnet.data.tasks import Outline, Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Phase, bits
from exssnet.methods.shared.dense import DenseSettings
from exssnet.methods.shared.listed import Listed
from exssnet.models.text_classifier import TextClassifier


@dataclass(frozen=True)
class TextSettings(DenseSettings):
    """`clip` bounds the norm of a step's gradient; 0: it does not."""

    epochs: int = 4
    lr: float = 3e-5
    clip: float = 0.0

    may_be_zero: ClassVar[tuple[str, ...]] = ("clip",)


class AllClasses(ABC):
    """Answers among the classes of all tasks, without being told which task it is."""

    @abstractmethod
    def answers(self, x: Tensor) -> Tensor:
        """The stream's own number of the class of each text."""


class TextMethod(Listed):
    """A classifier on a transformer. What is not trained is in no checkpoint: it is the encoder's own."""

    settings_type: ClassVar[type[Any]] = TextSettings
    heads: ClassVar[tuple[str, ...]] = ("masked-test", "task")
    trains_encoder = True
    readout: ClassVar[str] = "mean"
    network: Any  # a TextClassifier, unless the method makes another

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "masked-test", outline: Outline | None = None
    ) -> None:
        super().__init__(module, settings, seed, head, outline)
        if outline is None or not outline.numbers:
            raise InputError(f"{self.name} must know the classes of all tasks beforehand: give an Outline with numbers")
        self.numbers = sorted({number for group in outline.numbers for number in group})
        self.groups = [[self.numbers.index(number) for number in group] for group in outline.numbers]
        self.network = self.classifier(module)
        self.tasks: list[str] = []  # learned
        self.prepare()

    # --- what a method may change ----------------------------------------------------------------------------

    def classifier(self, module: nn.Module) -> nn.Module:
        """The network."""
        return TextClassifier(module, self.outputs(), self.readout, self.generator("head"))

    def prepare(self) -> None:
        """Put into the network what the method adds to it."""
        return

    def outputs(self) -> int:
        """How many outputs the network has."""
        return len(self.numbers)

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: all but what computes nothing that is read."""
        return {n: p for n, p in self.network.named_parameters() if not n.startswith("encoder.pooler.")}

    def phases(self, task: Task) -> Iterator[Phase]:
        yield Phase("train", list(self.trained().values()), self.settings.epochs, self.settings.lr)

    def loss(self, batch: Batch) -> Tensor:
        return self.new_loss(batch)

    def after_backward(self) -> None:
        if self.settings.clip:
            clip_grad_norm_(self.trained().values(), self.settings.clip)

    def end_task(self, task: Task) -> None:
        self.tasks.append(task.name)

    # --- what a rule is made of ------------------------------------------------------------------------------

    def columns(self, task: int) -> Tensor:
        """The outputs of a task, in the order of its labels."""
        return torch.tensor(self.groups[task], device=self._device())

    @property
    def own(self) -> Tensor:
        """The outputs of the task being learned."""
        return self.columns(len(self.tasks))

    def new_loss(self, batch: Batch) -> Tensor:
        """The loss on the new examples."""
        outputs = self.all_outputs(batch.x, training=True)
        batch.logits = outputs[:, self.own]
        return self.class_loss(outputs, batch.y, len(self.tasks))

    def old_loss(self, x: Tensor, labels: Tensor, task: int) -> Tensor:
        """The loss on examples of an earlier task; labels are its own."""
        return self.class_loss(self.all_outputs(x, training=True), labels, task)

    def class_loss(self, outputs: Tensor, labels: Tensor, task: int) -> Tensor:
        """Cross-entropy of all outputs [B, O], or of a task's own, under its labels."""
        own = self.columns(task)
        if self.head == "task":
            return self.engine.cross_entropy(outputs[:, own], labels)
        return self.engine.cross_entropy(outputs, own[labels])

    def all_outputs(self, x: Tensor, *, training: bool) -> Tensor:
        """All outputs [B, O]."""
        out: Tensor = self.network.train(training)(x)
        return out

    def generator(self, *purpose: str | int) -> torch.Generator:
        """For what is drawn outside of steps."""
        return randomness.generator(self.seed, self.name, *purpose)

    # --- what a run and the loop ask for ---------------------------------------------------------------------

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        return self.all_outputs(x, training=training)[:, self.own]

    def logits(self, x: Tensor, task: str) -> Tensor:
        with torch.no_grad():
            return self.all_outputs(x, training=False)[:, self.columns(self.tasks.index(task))]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        trained = {f"network.{name}" for name in self.trained()}
        tensors, facts = super().state()
        return {n: t for n, t in tensors.items() if n in trained or not n.startswith("network.")}, facts

    def storage(self) -> dict[str, int]:
        """Bits to keep: what was trained. An encoder that is not trained is everybody's own."""
        return {"weight_bits": bits(self.trained().values())}


class AllClassText(TextMethod, AllClasses):
    """A classifier that can be asked without being told the task."""

    def answers(self, x: Tensor) -> Tensor:
        numbers = torch.tensor(self.numbers, device=x.device)
        with torch.no_grad():
            return numbers[self.all_outputs(x, training=False).argmax(1)]
