"""What the methods that train one dense network have in common. A method adds its update rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exssnet.core.engine import Engine
from exssnet.core.proof import Verification
from exssnet.data.tasks import Outline, Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Phase, bits, check_positive, check_whole
from exssnet.methods.shared.flat_network import FlatNetwork
from exssnet.methods.shared.heads import HEADS, Head
from exssnet.methods.shared.listed import Listed


@dataclass(frozen=True)
class DenseSettings:
    """Settings of every dense method."""

    epochs: int = 30
    lr: float = 0.001

    may_be_zero: ClassVar[tuple[str, ...]] = ()  # the other floats must be positive

    def __post_init__(self) -> None:
        check_whole(self, epochs=1)
        check_positive(self, self.may_be_zero)

    @property
    def epochs_per_task(self) -> int:
        return self.epochs

    @classmethod
    def of_epochs(cls, epochs: int) -> dict[str, int]:
        return {"epochs": epochs}


class Dense(Listed):
    """One network, all of whose weights every task may move."""

    settings_type: ClassVar[type[Any]] = DenseSettings
    heads: ClassVar[tuple[str, ...]] = HEADS
    rivals: Tensor

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "task", outline: Outline | None = None
    ) -> None:
        super().__init__(module, settings, seed, head, outline)
        if outline is None:
            raise InputError(f"{self.name} must know the classes of all tasks beforehand: give an Outline")
        self.network = FlatNetwork(module)
        self.outputs_of = Head(head, outline.classes)
        self.register_buffer("rivals", self.outputs_of.rivals(), persistent=False)
        self.tasks: list[str] = []  # learned

    # --- what a method may change ----------------------------------------------------------------------------

    def phases(self, task: Task) -> Iterator[Phase]:
        yield Phase("train", [self.network.weights], self.settings.epochs, self.settings.lr)

    def loss(self, batch: Batch) -> Tensor:
        return self.new_loss(batch)

    def end_task(self, task: Task) -> None:
        self.tasks.append(task.name)

    def stored(self) -> Iterable[Tensor]:
        """What the method needs between tasks besides the network."""
        return ()

    # --- what an update rule is made of ----------------------------------------------------------------------

    @property
    def own(self) -> slice:
        """The outputs of the task being learned."""
        return self.outputs_of.slices[len(self.tasks)]

    def outputs(self, x: Tensor) -> Tensor:
        """All outputs [B, O] of the network in training."""
        out: Tensor = self.network(x, training=True)
        return out

    def new_loss(self, batch: Batch) -> Tensor:
        """The loss on the new examples; leaves all outputs [B, O] in `self.seen`."""
        self.seen = self.outputs(batch.x)
        return self.loss_of(self.seen, batch)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss on the new examples, from all outputs [B, O]."""
        batch.logits = outputs[:, self.own]
        trained = self.outputs_of.trained(len(self.tasks))
        return self.engine.cross_entropy(outputs[:, trained], batch.y + (self.own.start - trained.start))

    def old_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss on examples of any task, from all outputs [B, O]; labels are positions among the outputs."""
        return self.engine.cross_entropy(outputs.masked_fill(~self.rivals[labels], -torch.inf), labels)

    # --- what a run and the loop ask for ---------------------------------------------------------------------

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        out: Tensor = self.network(x, training=training)
        return out[:, self.own]

    def logits(self, x: Tensor, task: str) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.network(x, training=False)
            return out[:, self.outputs_of.slices[self.tasks.index(task)]]

    def use(self, engine: Engine) -> None:
        super().use(engine)
        self.network.use(engine)

    def storage(self) -> dict[str, int]:
        """Bits to keep: the weights, the norm statistics, and what the method stores besides them."""
        return {
            "weight_bits": bits([self.network.weights]),
            "private_bits": bits(self.network.statistics.values()),
            "method_bits": bits(self.stored()),
        }

    @staticmethod
    def module_outputs(head: str, classes: Sequence[int]) -> int:
        return Head(head, classes).size


class Proved(Dense):
    """A dense method whose tasks, once learned, do not change, and that shows it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.digests: dict[str, str] = {}  # of each task, as it was learned

    @abstractmethod
    def digest(self, task: str) -> str:
        """Of all that a learned task computes with, as it is now."""

    def verify(self) -> Verification | None:
        return self._report()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors, facts | {"digests": self.digests}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self.digests = dict(facts["digests"])
        self._report().require()

    def _report(self) -> Verification:
        changed = [(task, "network") for task in self.tasks if self.digest(task) != self.digests[task]]
        return Verification(dict(self.digests), tuple(changed))
