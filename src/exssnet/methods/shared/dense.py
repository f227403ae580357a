"""What the methods that train one dense network have in common. A method adds its update rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exssnet.core.proof import Verification
from exssnet.data.tasks import Outline, Task
from exssnet.engine.execution import Execution
from exssnet.engine.loss import cross_entropy
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Method, Phase, bits, check_positive
from exssnet.methods.shared.dense_network import DenseNetwork
from exssnet.methods.shared.heads import HEADS, Head

Kept = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class DenseSettings:
    """Settings of every dense method."""

    epochs: int = 30
    lr: float = 0.001

    def __post_init__(self) -> None:
        if type(self.epochs) is not int or self.epochs < 1:
            raise InputError(f"epochs is {self.epochs}: it must be a whole number, at least 1")
        check_positive(self, "lr")


class Dense(Method):
    """One network, all of whose weights every task may move."""

    settings_type: ClassVar[type[Any]] = DenseSettings
    heads: ClassVar[tuple[str, ...]] = HEADS
    keeps: ClassVar[tuple[str, ...]] = ()  # attributes, tensors or dicts of them, that are part of the state
    moves: ClassVar[tuple[str, ...]] = ()  # attributes that change in every step, in place

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "task", outline: Outline | None = None
    ) -> None:
        super().__init__(module, settings, seed, head, outline)
        if outline is None:
            raise InputError(f"{self.name} must know the classes of all tasks beforehand: give an Outline")
        self.network = DenseNetwork(module)
        self.outputs_of = Head(head, outline.classes)
        self.rivals = self.outputs_of.rivals()
        self.tasks: list[str] = []  # learned

    @staticmethod
    def outputs(head: str, classes: Sequence[int]) -> int:
        return Head(head, classes).size

    @staticmethod
    def planned_epochs(settings: DenseSettings) -> int:
        return settings.epochs

    # --- what a method may change ----------------------------------------------------------------------------

    def phases(self, task: Task) -> Iterator[Phase]:
        yield Phase("train", [self.network.weights], self.settings.epochs, self.settings.lr)

    def loss(self, batch: Batch) -> Tensor:
        return self.new_loss(batch)

    def end_task(self, task: Task) -> None:
        self.tasks.append(task.name)

    # --- what an update rule is made of ----------------------------------------------------------------------

    @property
    def own(self) -> slice:
        """The outputs of the task being learned."""
        return self.outputs_of.slices[len(self.tasks)]

    def new_loss(self, batch: Batch) -> Tensor:
        """The loss on the new examples; leaves all outputs [B, O] in `self.seen`."""
        self.seen = self.network.run(batch.x, training=True)
        return self.loss_of(self.seen, batch)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss on the new examples, from all outputs [B, O]."""
        batch.logits = outputs[:, self.own]
        trained = self.outputs_of.trained(len(self.tasks))
        return cross_entropy(outputs[:, trained], batch.y + (self.own.start - trained.start))

    def old_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss on examples of any task, from all outputs [B, O]; labels are places among the outputs."""
        return cross_entropy(outputs.masked_fill(~self.rivals[labels], -torch.inf), labels)

    # --- what a run and the loop ask for ---------------------------------------------------------------------

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        return self.network.run(x, training=training)[:, self.own]

    def logits(self, x: Tensor, task: str) -> Tensor:
        with torch.no_grad():
            return self.network.run(x, training=False)[:, self.outputs_of.slices[self.tasks.index(task)]]

    @property
    def capturable(self) -> bool:
        return self.network.runner.capturable

    def execute(self, execution: Execution) -> None:
        self.network.execute(execution)

    def to(self, device: str) -> None:
        self.network.to(device)
        self.rivals = self.rivals.to(device)
        for name, kept in self._kept().items():
            moved = {n: t.to(device) for n, t in kept.items()} if isinstance(kept, dict) else kept.to(device)
            setattr(self, name, moved)

    def buffers(self) -> dict[str, Tensor]:
        return self.network.buffers | _flat({name: getattr(self, name) for name in self.moves})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {"weights": self.network.weights.detach()}
        tensors |= {f"buffer.{name}": buffer for name, buffer in self.network.buffers.items()}
        return tensors | {f"kept.{name}": kept for name, kept in _flat(self._kept()).items()}, {"tasks": self.tasks}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        network = self.network
        with torch.no_grad():
            network.weights.copy_(tensors["weights"])
            for name, buffer in network.buffers.items():
                buffer.copy_(tensors[f"buffer.{name}"])
        self.tasks = list(facts["tasks"])
        for name in self.keeps:
            whole, part = f"kept.{name}", f"kept.{name}/"
            if whole in tensors:
                setattr(self, name, tensors[whole].to(network.device))
            else:
                found = {n.removeprefix(part): t.to(network.device) for n, t in tensors.items() if n.startswith(part)}
                setattr(self, name, found)

    def verify(self) -> Verification | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"storage": self.storage()}

    def storage(self) -> dict[str, int]:
        """Bits to keep: the weights, the norm statistics, and what the method keeps beside them."""
        return {
            "weight_bits": bits([self.network.weights]),
            "private_bits": bits(self.network.buffers.values()),
            "method_bits": bits(_flat({name: getattr(self, name) for name in self.stored()}).values()),
        }

    def stored(self) -> Sequence[str]:
        """What of the state is needed between tasks, and not only while one is learned."""
        return [name for name in self.keeps if name not in self.moves]

    def _kept(self) -> dict[str, Kept]:
        return {name: getattr(self, name) for name in self.keeps}


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


def _flat(kept: Mapping[str, Kept]) -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for name, value in kept.items():
        flat |= {f"{name}/{n}": t for n, t in value.items()} if isinstance(value, dict) else {name: value}
    return flat
