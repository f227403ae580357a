"""What the methods that gate the units of one network have in common: what is a task's own, and what it may not move.

A task's gates, head and norm statistics are its own. Of the weights, which all tasks share, those in use are held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from exssnet.data.tasks import Outline, Task
from exssnet.methods.base import Batch, Phase, Tensors, bits
from exssnet.methods.gates._units import Gate, freedom, gated
from exssnet.methods.shared.dense import Dense, DenseSettings


@dataclass(frozen=True)
class GatedSettings(DenseSettings):
    """What decides the gates learns at `gate_rate` times `lr`."""

    gate_rate: float = 10.0


class GatedDense(Dense):
    """One network, and for each task gates that say which of its units the task uses.

    The head is each task's own with every kind of `head`: that says only which outputs a task has.
    """

    gate: ClassVar[type[Gate]]
    used: Tensor  # how far each unit is used by earlier tasks, 0 to 1
    last_weights: Tensor  # a step ago
    last_gates: Tensor
    free: Tensor  # how far each weight may move

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "task", outline: Outline | None = None
    ) -> None:
        network, self.layers = gated(module, self.gate)
        super().__init__(network, settings, seed, head, outline)
        for name in [n for n in self.network.statistics if _is_of_gate(network, n)]:  # passed in with every call
            self.network.statistics.pop(name)
            del self.network.start_statistics[name]
        self.register_buffer("used", self.network.start.new_zeros(sum(layer.units for layer in self.layers)))
        self.private = Tensors()  # by task and name
        self.gates = torch.zeros(0)  # what decides the gates of the task being learned
        for name in ("last_weights", "last_gates", "free"):
            self.register_buffer(name, torch.zeros(0), persistent=False)
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
        out: Tensor = self.network(batch.x, training=True, statistics=self.with_statistics(gates))
        return out

    def with_statistics(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gates together with the network's statistics."""
        return {**dict(self.network.statistics.items()), **gates}

    def hold(self) -> None:
        """Of the optimizer's last step, let each weight keep what it is free to move; a second call changes nothing.

        For plain SGD that is a gradient times the freedom. Other optimizers would undo the factor (Adam divides by the
        gradient's size) or move on without a gradient (momentum, decay), so it is the step that is scaled.
        """
        weights, gates = self.network.weights, self.gates
        with torch.no_grad():
            weights.copy_(torch.lerp(self.last_weights, weights, self.free))  # bit for bit at 0 and at 1
            gates.copy_(torch.lerp(self.last_gates, gates, self.settings.gate_rate))
            self.last_weights.copy_(weights)
            self.last_gates.copy_(gates)

    # --- what a run and the loop ask for ---------------------------------------------------------------------

    def phases(self, task: Task) -> Iterator[Phase]:
        network = self.network
        with torch.no_grad():
            for name, own in self._head(network.weights).items():
                own.copy_(self._head(network.start)[name])
            for name, tensor in network.statistics.items():
                tensor.copy_(network.start_statistics[name])
        self.gates = self.fresh_gates(task.name).to(self.used).requires_grad_()
        self._settle()
        self.free = self.freedom(self.used, settled=bool(self.tasks))
        yield Phase("train", [network.weights, self.gates], self.settings.epochs, self.settings.lr)

    def end_task(self, task: Task) -> None:
        self.hold()
        heads = {f"head/{name}": rows[self.own] for name, rows in self._head(self.network.weights).items()}
        statistics = {f"buffer/{name}": tensor for name, tensor in self.network.statistics.items()}
        for name, tensor in {"gates": self.gates, **heads, **statistics}.items():
            self.private[f"{task.name}/{name}"] = tensor.detach().clone()
        self._settle()
        super().end_task(task)

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        self.hold()
        statistics = self.with_statistics(self.test_gates(self.gates, {}))
        out: Tensor = self.network(x, training=training, statistics=statistics)
        return out[:, self.own]

    def logits(self, x: Tensor, task: str) -> Tensor:
        private = self.private_of(task)
        own = self.outputs_of.slices[self.tasks.index(task)]
        with torch.no_grad():
            weights = self.network.weights.detach().clone()
            for name, rows in self._head(weights).items():
                rows[own] = private[f"head/{name}"]
            statistics = {name: private[f"buffer/{name}"] for name in self.network.statistics}
            statistics |= self.test_gates(private["gates"], private)
            out: Tensor = self.network(x, training=False, weights=weights, statistics=statistics)
            return out[:, own]

    def private_of(self, task: str) -> dict[str, Tensor]:
        """What a learned task has for itself, by name."""
        return self.private.below(f"{task}/")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gates = fn(self.gates)
        return self

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
        self.last_weights, self.last_gates = self.network.weights.detach().clone(), self.gates.detach().clone()
        self.free = torch.ones_like(self.last_weights)

    def _head(self, weights: Tensor) -> dict[str, Tensor]:
        """The head's part of the weights; views."""
        tensors = self.network.layout.tensors(weights)
        return {name: t for name, t in tensors.items() if name.rpartition(".")[0] == self.network.head}


def _is_of_gate(network: nn.Module, buffer: str) -> bool:
    return isinstance(network.get_submodule(buffer.rpartition(".")[0]), Gate)
