"""What a method is: phases to train, a loss, and at most four more places to say something.

The training loop asks for the phases of a task one after the other, trains each, and calls `end_task`. What stands
between two `yield`s of `phases` runs when the phase before it has been trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exssnet.core.proof import Verification
from exssnet.data.tasks import Data, Outline, Task
from exssnet.engine.execution import Execution
from exssnet.engine.loss import cross_entropy
from exssnet.errors import InputError


@dataclass(frozen=True)
class Phase:
    """A stretch of training: these parameters, this long, with a fresh optimizer and schedule from this rate."""

    name: str
    parameters: list[Tensor]
    epochs: int
    lr: float


@dataclass
class Batch:
    """Examples of the task being learned; the method leaves its logits here for the loop to count."""

    x: Tensor
    y: Tensor
    data: Data  # where they come from, and their places there
    index: Tensor
    generator: torch.Generator  # all that a method draws in a step is drawn from it
    logits: Tensor | None = None  # [B, classes of the task]

    def __len__(self) -> int:
        return len(self.y)


class Method(ABC):
    """A way to learn one task after another."""

    name: ClassVar[str]
    settings_type: ClassVar[type[Any]]
    heads: ClassVar[tuple[str, ...]] = ("shared", "task")  # which outputs a task has; the first is the usual one

    joint: ClassVar[bool] = False  # whether it learns all tasks at once: then it has `together`
    exclusive: ClassVar[bool] = False  # whether earlier tasks are promised, and checked with each new one, to stay
    remembers: ClassVar[bool] = False  # whether it keeps examples: then the data must be in memory

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "shared", outline: Outline | None = None
    ) -> None:
        self.settings, self.seed, self.head, self.outline = settings, seed, head, outline

    # --- what a method writes ------------------------------------------------------------------------------

    @abstractmethod
    def phases(self, task: Task) -> Iterator[Phase]:
        """Get ready for the task and yield what to train."""

    @abstractmethod
    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        """Logits for the task being learned."""

    @abstractmethod
    def logits(self, x: Tensor, task: str) -> Tensor:
        """Logits for a learned task, in evaluation mode and without gradients."""

    def loss(self, batch: Batch) -> Tensor:
        batch.logits = self.forward(batch.x, training=True)
        return cross_entropy(batch.logits, batch.y)

    def after_backward(self) -> None:
        """Change gradients before the optimizer steps."""
        return

    @abstractmethod
    def end_task(self, task: Task) -> None:
        """Keep what was learned."""

    # --- what a run, the loop and the record ask for ----------------------------------------------------------------

    @staticmethod
    def outputs(head: str, classes: Sequence[int]) -> int:
        """How many outputs the module needs for tasks of so many classes."""
        return max(classes)

    def together(self, tasks: Sequence[Task]) -> Task:
        """All tasks as one, for a method that learns them at once."""
        raise NotImplementedError

    @staticmethod
    def share_out(epochs: int) -> dict[str, int]:
        """The settings that make so many epochs per task, all phases together."""
        return {"epochs": epochs}

    @staticmethod
    @abstractmethod
    def planned_epochs(settings: Any) -> int:
        """Epochs per task, all phases together."""

    @abstractmethod
    def to(self, device: str) -> None: ...

    def execute(self, execution: Execution) -> None:
        """Compute this way; a method that knows only one way leaves it."""
        return

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured as a graph: not if it looks at values. It runs eagerly then."""
        return True

    def examine(self, data: Data) -> None:
        """Refuse, before the first task is learned, a module with which the method cannot keep what it promises."""
        return

    def buffers(self) -> dict[str, Tensor]:
        """Tensors that move in place while a phase trains, without being parameters."""
        return {}

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the finished tasks left behind: tensors, and JSON."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def verify(self) -> Verification | None:
        """Check the promise of zero forgetting; None from a method that does not make it."""

    def facts(self) -> dict[str, Any]:
        """The method's part of the run record: overlap, transfer, storage."""
        return {}


def check_positive(settings: object, *names: str) -> None:
    """Refuse settings that are no positive numbers."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise InputError(f"{name} is {value}: it must be a positive number")


def bits(tensors: Iterable[Tensor]) -> int:
    """What some tensors take."""
    return sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors)
