"""A small memory of earlier examples, and what the methods that replay from it have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from exssnet.data.tasks import Data, Outline, Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Phase, bits
from exssnet.methods.shared.dense import Dense, DenseSettings


class Old(NamedTuple):
    """Some remembered examples, as the network sees them."""

    x: Tensor
    labels: Tensor  # positions among the network's outputs
    targets: Tensor  # [B, O], or [B, 0] where none are kept


class Memory:
    """A reservoir: of all examples that were ever added, each is in it with the same probability.

    An example that is shown in every epoch is added in every epoch, as the published methods do it.

    Nothing here looks at values, so adding and drawing can be part of a captured step. What is dropped goes to a
    position behind the last one, which nobody reads.
    """

    def __init__(self, capacity: int, like: Tensor, outputs: int = 0) -> None:
        self.capacity = capacity
        self.x = like.new_zeros((capacity + 1, *like.shape[1:]))
        self.labels = torch.zeros(capacity + 1, dtype=torch.int64, device=like.device)
        self.targets = torch.zeros(capacity + 1, outputs, device=like.device)
        self.added = torch.zeros((), dtype=torch.int64, device=like.device)

    def add(self, x: Tensor, labels: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> None:
        """Let each of these examples take a free position, or one drawn from as many as were ever added."""
        number = self.added + torch.arange(len(x), device=x.device)
        draw = torch.rand(len(x), dtype=torch.float64, device=x.device, generator=generator)
        position = torch.where(number < self.capacity, number, (draw * (number + 1)).long()).clamp(max=self.capacity)
        # of several with one position the last has it, as if they had come one by one
        taken_later = (position[:, None] == position).triu(diagonal=1).any(1)
        position = position.masked_fill(taken_later, self.capacity)
        self.x[position] = x
        self.labels[position] = labels
        if targets is not None:
            self.targets[position] = targets.to(self.targets.dtype)
        self.added += len(x)

    def draw(self, count: int, data: Data, generator: torch.Generator) -> Old:
        """Examples at random, with replacement, augmented as the data's own."""
        uniform = torch.rand(count, dtype=torch.float64, device=self.x.device, generator=generator)
        position = (uniform * self.added.clamp(max=self.capacity)).long()
        return Old(data.shown(self.x[position], generator), self.labels[position], self.targets[position])

    def tensors(self) -> dict[str, Tensor]:
        """All but the position that nobody reads."""
        whole = {"x": self.x, "labels": self.labels, "targets": self.targets}
        return {name: tensor[:-1] for name, tensor in whole.items()} | {"added": self.added}


@dataclass(frozen=True)
class ReplaySettings(DenseSettings):
    """`buffer`: how many examples are kept; below 1 a share of all training examples of the stream."""

    buffer: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer >= 1 and self.buffer != int(self.buffer):
            raise InputError(f"buffer is {self.buffer}: give a share below 1, or a whole number of examples")

    def capacity(self, examples: int) -> int:
        """How many examples of such a stream are kept."""
        return min(int(self.buffer), examples) if self.buffer >= 1 else max(1, round(self.buffer * examples))


class Replay(Dense):
    """A dense network with a reservoir of examples that fills while tasks are learned."""

    settings_type: ClassVar[type[Any]] = ReplaySettings
    remembers = True
    keeps_targets: ClassVar[bool] = False

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "task", outline: Outline | None = None
    ) -> None:
        super().__init__(module, settings, seed, head, outline)
        self.memory: Memory | None = None  # made with the first task, whose examples it is like

    def phases(self, task: Task) -> Iterator[Phase]:
        if self.memory is None:
            assert self.outline is not None
            one = task.train.examples(torch.zeros(1, dtype=torch.int64, device=task.train.device))
            outputs = self.outputs_of.size if self.keeps_targets else 0
            self.memory = Memory(self.settings.capacity(self.outline.examples), one, outputs)
        yield from super().phases(task)

    def remember(self, batch: Batch) -> None:
        """Offer the batch to the memory, with the outputs it has now."""
        assert self.memory is not None
        targets = self.seen.detach() if self.keeps_targets else None
        self.memory.add(batch.data.examples(batch.index), batch.y + self.own.start, batch.generator, targets)

    def recall(self, batch: Batch) -> Old:
        """As many old examples as the batch has new ones; from the second task on."""
        assert self.memory is not None
        return self.memory.draw(len(batch), batch.data, batch.generator)

    def moving(self) -> dict[str, Tensor]:
        moving = {} if self.memory is None else {f"memory.{n}": t for n, t in self.memory.tensors().items()}
        return super().moving() | moving

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        kept = {} if self.memory is None else {f"memory.{n}": t for n, t in self.memory.tensors().items()}
        return tensors | kept, facts

    def load_state(self, tensors: Any, facts: Any) -> None:
        super().load_state({n: t for n, t in tensors.items() if not n.startswith("memory.")}, facts)
        found = {n.removeprefix("memory."): t for n, t in tensors.items() if n.startswith("memory.")}
        if found:
            found = {name: tensor.to(self.network.device) for name, tensor in found.items()}
            self.memory = Memory(len(found["x"]), found["x"][:1], found["targets"].shape[1])
            for name, tensor in self.memory.tensors().items():
                tensor.copy_(found[name])

    def storage(self) -> dict[str, int]:
        kept = 0
        if self.memory is not None:
            kept = bits(tensor for name, tensor in self.memory.tensors().items() if name != "added")
        return super().storage() | {"memory_bits": kept}
