"""A network of its own for each task: nothing is forgotten, nothing shared, and the storage grows with every task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from exssnet.core.proof import Verification, combined_digest, tensor_digest
from exssnet.data.task import Task
from exssnet.methods.base import Phase
from exssnet.methods.dense import Dense


class Individual(Dense):
    """Train a new network for each task: the bound for methods that share one."""

    name = "individual"
    heads = ("shared", "task", "masked-test")
    keeps = ("networks",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.networks: dict[str, Tensor] = {}  # weights and buffers, by task and name
        self._digests: dict[str, str] = {}

    def phases(self, task: Task) -> Iterator[Phase]:
        self.network.reset()
        yield from super().phases(task)

    def end_task(self, task: Task) -> None:
        self.networks[f"{task.name}/weights"] = self.network.weights.detach().clone()
        self.networks |= {f"{task.name}/buffer/{name}": b.clone() for name, b in self.network.buffers.items()}
        self._digests[task.name] = self._digest(task.name)
        super().end_task(task)

    def logits(self, x: Tensor, task: str) -> Tensor:
        prefix = f"{task}/buffer/"
        buffers = {n.removeprefix(prefix): t for n, t in self.networks.items() if n.startswith(prefix)}
        with torch.no_grad():
            outputs = self.network.run(x, training=False, weights=self.networks[f"{task}/weights"], buffers=buffers)
        return outputs[:, self.outputs_of.slices[self.tasks.index(task)]]

    def verify(self) -> Verification | None:
        changed = [(task, "network") for task in self.tasks if self._digest(task) != self._digests[task]]
        return Verification(dict(self._digests), tuple(changed))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors, facts | {"digests": self._digests}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self._digests = dict(facts["digests"])
        report = self.verify()
        assert report is not None
        report.require()

    def storage(self) -> dict[str, int]:
        return {"weight_bits": super().storage()["method_bits"]}  # the network being trained is none of them

    def _digest(self, task: str) -> str:
        kept = {name: tensor_digest(t) for name, t in self.networks.items() if name.startswith(f"{task}/")}
        return combined_digest(kept)
