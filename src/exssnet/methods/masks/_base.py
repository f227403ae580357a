"""What the methods that keep a mask for each task over one network have in common. A method adds its phases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from exssnet.core import changes
from exssnet.core.engine import Engine
from exssnet.core.module.hidden_state import HiddenState
from exssnet.core.network import MaskedNetwork
from exssnet.core.proof import Verification
from exssnet.core.subnetwork import OwnSubnetwork, Subnetwork
from exssnet.data.tasks import Data, Outline, Task
from exssnet.methods.base import Method, bits

EXAMINED = 16  # examples with which a module is tried out

NewTask = tuple[MaskedNetwork, str, int]  # what a subnetwork is made of: the network, the task's name and classes


class Isolated(Method):
    """One network whose tasks are masks: what earlier tasks use is not a parameter of a later one."""

    exclusive = True

    def __init__(
        self, module: nn.Module, settings: Any, seed: int, head: str = "shared", outline: Outline | None = None, *,
        density: float | None = None, init: str = "keep", private: Collection[str] = (), head_layer: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, settings, seed, head, outline)
        share = settings.density if density is None else density
        self.network = MaskedNetwork(module, share, seed, init=init, private=private, head=head, head_layer=head_layer)
        self.subnetwork: Subnetwork | None = None  # of the task being learned
        self._examined = False

    def begin(self, task: Task) -> NewTask:
        """What the first subnetwork of a new task is made of."""
        self.network.check_new(task.name, task.train.classes)
        self.examine(task.train)
        return self.network, task.name, task.train.classes

    def examine(self, data: Data) -> None:
        """Refuse, before the first task is learned, a module with state that no tensor holds: tasks would change."""
        if self._examined:
            return
        network = self.network

        def tensors() -> dict[str, Tensor]:
            own = network.start_private("", data.classes)
            every = {**network.frozen, **own, **network.layout.tensors(network.weights)}
            return {name: tensor.detach().clone() for name, tensor in every.items()}

        few = data.batch(torch.arange(min(len(data), EXAMINED), device=data.device))[0]
        structure = network.structure
        HiddenState(structure.skeleton, structure.still, tensors, network.input(few)).refuse()
        self._examined = True

    def end_task(self, task: Task) -> None:
        assert isinstance(self.subnetwork, OwnSubnetwork)
        self.subnetwork.commit()
        self.subnetwork = None

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        assert self.subnetwork is not None
        return self.subnetwork.logits(x, training=training)

    def logits(self, x: Tensor, task: str) -> Tensor:
        return self.network.logits(x, task)

    def verify(self) -> Verification | None:
        report = self.network.verify()
        if self.exclusive:
            report.require()
        return report

    def moving(self) -> dict[str, Tensor]:
        return self.subnetwork.buffers() if self.subnetwork is not None else {}

    def use(self, engine: Engine) -> None:
        super().use(engine)
        self.network.use(engine)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, cards = changes.state(self.network)
        return super().state()[0] | tensors, {"tasks": cards}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        of_network = {n: t for n, t in tensors.items() if n == "weights" or n.startswith("task.")}
        super().load_state({n: t for n, t in tensors.items() if n not in of_network}, facts)
        changes.load_state(self.network, of_network, facts["tasks"])
        self.verify()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.network.to(fn(torch.empty(0)).device)
        return self

    def _device(self) -> torch.device:
        return self.network.device

    def report(self) -> dict[str, Any]:
        overlaps = [task.overlap for task in self.network.tasks.values()]
        return {"sparse_overlap": overlaps, "storage": self.storage()}

    def storage(self) -> dict[str, int]:
        """Bits to keep: a bit per weight and task, trained weights, and private tensors."""
        network = self.network
        return {
            "mask_bits": network.bank.bits,
            "weight_bits": 8 * network.weights.element_size() * self.trained_weights(),
            "private_bits": bits(t for task in network.tasks.values() for t in task.private.values()),
        }

    def trained_weights(self) -> int:
        """Shared weights that differ from their seed: only these are stored."""
        return sum(task.trained_weights for task in self.network.tasks.values())
