"""What the methods that gate the units of one network have in common: what is a task's own, and what it may not move.

A task's gates, head and norm statistics are its own. Of the weights, which all tasks share, those in use are held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exssnet.data.tasks import Outline, Task
from exssnet.engine.execution import Execution
from exssnet.methods.base import Batch, Phase, bits, check_positive
from exssnet.methods.shared.dense import Dense, DenseSettings
from exssnet.methods.shared.units import Gate, freedom, gated


@dataclass(frozen=True)
class GatedSettings(DenseSettings):
    """What decides the gates learns at `gate_rate` times `lr`."""

    gate_rate: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "gate_rate")


class GatedDense(Dense):
    """One network, and for each task gates that say which of its units the task uses.

    The head is each task's own with every kind of `head`: that says only which outputs a task has.
    """

    gate: ClassVar[type[Gate]]
    keeps = ("used", "private")
    moves: ClassVar[tuple[str, ...]] = ("place", "before")

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "task", outline: Outline | None = None
    ) -> None:
        network, self.layers = gated(module, self.gate)
        super().__init__(network, settings, seed, head, outline)
        for name in [n for n in self.network.buffers if isinstance(network.get_submodule(n.rpartition(".")[0]), Gate)]:
            del self.network.buffers[name], self.network.start_buffers[name]  # a gate's own: passed in with every call
        self.used = self.network.start.new_zeros(sum(layer.units for layer in self.layers))  # by earlier tasks, 0 to 1
        self.private: dict[str, Tensor] = {}  # by task and name
        self.gates = torch.zeros(0)  # what decides the gates of the task being learned
        self._settle()

    # --- what a method writes --------------------------------------------------------------------------------

    @abstractmethod
    def fresh_gates(self, task: str) -> Tensor:
        """What decides a new task's gates, as one vector."""

    @abstractmethod
    def test_gates(self, gates: Tensor, private: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gates' tensors for evaluation; `private` is empty for the task being learned."""

    # --- what an update rule is made of ----------------------------------------------------------------------

    def by_layer(self, values: Tensor) -> Sequence[Tensor]:
        """Numbers of all units [..., units], layer by layer."""
        return torch.split(values, [layer.units for layer in self.layers], dim=-1)

    def freedom(self, used: Tensor, settled: bool) -> Tensor:
        """How far each weight may move where the units are used so far."""
        network = self.network
        return freedom(network.layout, self.layers, self.by_layer(used), head=network.head, settled=settled)

    def outputs_with(self, batch: Batch, gates: Mapping[str, Tensor]) -> Tensor:
        """What the network gives for new examples under these gates."""
        return self.network.run(batch.x, training=True, buffers={**self.network.buffers, **gates})

    def hold(self) -> None:
        """Of the optimizer's last step, let each weight keep what it is free to move; a second call changes nothing.

        For plain SGD that is a gradient times the freedom. Other optimizers would undo the factor (Adam divides by the
        gradient's size) or move on without a gradient (momentum, decay), so it is the step that is scaled.
        """
        weights, gates = self.network.weights, self.gates
        with torch.no_grad():
            weights.copy_(torch.lerp(self.place, weights, self.free))  # bit for bit at 0 and at 1
            gates.copy_(torch.lerp(self.before, gates, self.settings.gate_rate))
            self.place.copy_(weights)
            self.before.copy_(gates)

    # --- what a run and the loop ask for ---------------------------------------------------------------------

    def phases(self, task: Task) -> Iterator[Phase]:
        network = self.network
        with torch.no_grad():
            for name, own in self._head(network.weights).items():
                own.copy_(self._head(network.start)[name])
            for name, buffer in network.buffers.items():
                buffer.copy_(network.start_buffers[name])
        self.gates = self.fresh_gates(task.name).to(self.used).requires_grad_()
        self._settle()
        self.free = self.freedom(self.used, settled=bool(self.tasks))
        yield Phase("train", [network.weights, self.gates], self.settings.epochs, self.settings.lr)

    def end_task(self, task: Task) -> None:
        self.hold()
        heads = {f"head/{name}": rows[self.own] for name, rows in self._head(self.network.weights).items()}
        buffers = {f"buffer/{name}": buffer for name, buffer in self.network.buffers.items()}
        for name, tensor in {"gates": self.gates, **heads, **buffers}.items():
            self.private[f"{task.name}/{name}"] = tensor.detach().clone()
        self._settle()
        super().end_task(task)

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        self.hold()
        buffers = {**self.network.buffers, **self.test_gates(self.gates, {})}
        return self.network.run(x, training=training, buffers=buffers)[:, self.own]

    def logits(self, x: Tensor, task: str) -> Tensor:
        private = self.private_of(task)
        own = self.outputs_of.slices[self.tasks.index(task)]
        with torch.no_grad():
            weights = self.network.weights.detach().clone()
            for name, rows in self._head(weights).items():
                rows[own] = private[f"head/{name}"]
            buffers = {name: private[f"buffer/{name}"] for name in self.network.buffers}
            gates = self.test_gates(private["gates"], private)
            return self.network.run(x, training=False, weights=weights, buffers={**buffers, **gates})[:, own]

    def private_of(self, task: str) -> dict[str, Tensor]:
        """What a learned task has for itself, by name."""
        prefix = f"{task}/"
        return {n.removeprefix(prefix): t for n, t in self.private.items() if n.startswith(prefix)}

    def execute(self, execution: Execution) -> None:
        # a network without gates, or with others, must not be taken for this one
        structure = f"{execution.structure} {self.name}" if execution.structure else ""
        super().execute(replace(execution, structure=structure))

    def to(self, device: str) -> None:
        super().to(device)
        self.gates = self.gates.to(device)
        self._settle()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.hold()  # an epoch's last step may not have been held yet
        return super().state()

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self._settle()

    def storage(self) -> dict[str, int]:
        """Bits to keep: the shared weights, what is each task's own, and which units are used."""
        weights = self.network.weights
        return {
            "weight_bits": bits([weights]) - bits(self._head(weights).values()),
            "private_bits": bits(self.private.values()),
            "method_bits": bits([self.used]),
        }

    def _settle(self) -> None:
        """Weights and gates are where they should be: nothing is to be held back."""
        self.place, self.before = self.network.weights.detach().clone(), self.gates.detach().clone()  # a step ago
        self.free = torch.ones_like(self.place)  # how far each weight may move

    def _head(self, weights: Tensor) -> dict[str, Tensor]:
        """The head's part of the weights; views."""
        tensors = self.network.layout.tensors(weights)
        return {name: t for name, t in tensors.items() if name.rpartition(".")[0] == self.network.head}
