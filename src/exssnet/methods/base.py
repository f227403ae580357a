"""What a method is: phases to train, a loss, and at most four more things to say.

The training loop asks for the phases of a task one after the other, trains each, and calls `end_task`. What stands
between two `yield`s of `phases` runs when the phase before it has been trained. A method is an `nn.Module`: what it
registers as a buffer moves with it to a device, is saved in checkpoints and restored from them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from exssnet.core.engine import Engine
from exssnet.core.proof import Verification
from exssnet.data.tasks import Data, Outline, Task
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
    data: Data  # where they come from, and their positions there
    index: Tensor
    generator: torch.Generator  # all that a method draws in a step is drawn from it
    logits: Tensor | None = None  # [B, classes of the task]

    def __len__(self) -> int:
        return len(self.y)


class Settings(Protocol):
    """A method's settings: a frozen dataclass that checks its fields."""

    @property
    def epochs_per_task(self) -> int:
        """All phases together."""

    @classmethod
    def of_epochs(cls, epochs: int) -> dict[str, int]:
        """The settings that make this many epochs per task."""


class Method(nn.Module):
    """A way to learn one task after another."""

    name: ClassVar[str]
    settings_type: ClassVar[type[Any]]
    heads: ClassVar[tuple[str, ...]] = ("shared", "task")  # which outputs a task has; the first is the usual one

    exclusive: ClassVar[bool] = False  # whether earlier tasks are promised, and checked with each new one, to stay
    remembers: ClassVar[bool] = False  # whether it keeps examples: then the data must be in memory
    trains_encoder: ClassVar[bool] = False  # whether its module is a text encoder, and its inputs are tokens

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "shared", outline: Outline | None = None
    ) -> None:
        super().__init__()
        self.settings, self.seed, self.head, self.outline = settings, seed, head, outline
        self.engine = Engine()
        self.capturable = True  # until an engine finds out that its steps are not

    # --- what a method writes ------------------------------------------------------------------------------

    @abstractmethod
    def phases(self, task: Task) -> Iterator[Phase]:
        """Get ready for the task and yield what to train."""

    @abstractmethod
    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        """Logits for the task being learned."""

    def loss(self, batch: Batch) -> Tensor:
        """The loss on a batch; leaves its logits there."""
        batch.logits = self.forward(batch.x, training=True)
        return self.engine.cross_entropy(batch.logits, batch.y)

    def after_backward(self) -> None:
        """Change gradients before the optimizer steps."""
        return

    @abstractmethod
    def end_task(self, task: Task) -> None:
        """Keep what was learned."""

    @abstractmethod
    def logits(self, x: Tensor, task: str) -> Tensor:
        """Logits for a learned task, in evaluation mode and without gradients."""

    def verify(self) -> Verification | None:
        """Check the promise of zero forgetting; None from a method that does not make it."""
        return None

    def report(self) -> dict[str, Any]:
        """What the run record says of this method: overlap, transfer, storage."""
        return {}

    # --- what the loop asks for ------------------------------------------------------------------------------

    def use(self, engine: Engine) -> None:
        """Compute with this engine from now on."""
        self.engine = engine

    def moving(self) -> dict[str, Tensor]:
        """Tensors that change in place while a phase trains, without being parameters."""
        return dict(self.named_buffers())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the finished tasks left behind: tensors, and JSON."""
        return self.state_dict(), {}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore what `state` gave, on a method made the same way."""
        modules = sorted(self.named_modules(), key=lambda named: -len(named[0]))
        for name, tensor in tensors.items():
            owner = next((own, module) for own, module in modules if not own or name.startswith(f"{own}."))
            short = name.removeprefix(f"{owner[0]}." if owner[0] else "")
            parameter = owner[1]._parameters.get(short)
            if parameter is None:
                owner[1]._buffers[short] = tensor.to(self._device()).clone()
            else:
                with torch.no_grad():
                    parameter.copy_(tensor)

    def _device(self) -> torch.device:
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    @staticmethod
    def module_outputs(head: str, classes: Sequence[int]) -> int:
        """How many outputs the module needs for tasks of these numbers of classes."""
        return max(classes)


class JointMethod(Method):
    """A method that learns all tasks at once."""

    @abstractmethod
    def together(self, tasks: Sequence[Task]) -> Task:
        """All tasks as one."""


class Tensors(nn.Module):
    """Tensors by name, as part of a method's state: a dictionary whose names may be any text."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.update(tensors or {})

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._buffers[name]
        assert tensor is not None
        return tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._buffers[name] = tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def keys(self) -> Iterable[str]:
        return self._buffers.keys()

    def items(self) -> list[tuple[str, Tensor]]:
        return [(name, self[name]) for name in self]

    def values(self) -> list[Tensor]:
        return [self[name] for name in self]

    def get(self, name: str) -> Tensor | None:
        return self._buffers.get(name)

    def pop(self, name: str) -> None:
        self._buffers.pop(name, None)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these in, under names that may be taken."""
        self._buffers.update(tensors)

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Those whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.items() if name.startswith(prefix)}


def check_positive(settings: Any, may_be_zero: Sequence[str] = ()) -> None:
    """Refuse fields of type float whose values are not positive numbers."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.type not in ("float", float) or field.name == "density":  # that the network checks
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and field.name in may_be_zero and 0 <= value < float("inf"):
            continue
        if not number or not 0 < value < float("inf"):
            raise InputError(f"{field.name} is {value}: it must be a positive number, for example 0.001")


def check_whole(settings: Any, **least: int) -> None:
    """Refuse settings that are not whole numbers of at least this."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        if type(value) is not int or value < lowest:
            raise InputError(f"{name} is {value}: it must be a whole number, at least {lowest}")


def bits(tensors: Iterable[Tensor]) -> int:
    """What some tensors take."""
    return sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors)
