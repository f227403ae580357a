"""A network of its own for each task: nothing is forgotten, nothing shared, and the storage grows with every task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from exssnet.core.proof import combined_digest, tensor_digest
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase
from exssnet.methods.shared.dense import Proved


class Individual(Proved):
    """Train a new network for each task: the bound for methods that share one."""

    name = "individual"
    heads = ("shared", "task", "masked-test")
    keeps = ("networks",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.networks: dict[str, Tensor] = {}  # weights and buffers, by task and name

    def phases(self, task: Task) -> Iterator[Phase]:
        self.network.reset()
        yield from super().phases(task)

    def end_task(self, task: Task) -> None:
        self.networks[f"{task.name}/weights"] = self.network.weights.detach().clone()
        self.networks |= {f"{task.name}/buffer/{name}": b.clone() for name, b in self.network.buffers.items()}
        self.digests[task.name] = self.digest(task.name)
        super().end_task(task)

    def logits(self, x: Tensor, task: str) -> Tensor:
        prefix = f"{task}/buffer/"
        buffers = {n.removeprefix(prefix): t for n, t in self.networks.items() if n.startswith(prefix)}
        with torch.no_grad():
            outputs = self.network.run(x, training=False, weights=self.networks[f"{task}/weights"], buffers=buffers)
        return outputs[:, self.outputs_of.slices[self.tasks.index(task)]]

    def storage(self) -> dict[str, int]:
        return {"weight_bits": super().storage()["method_bits"]}  # the network being trained is none of them

    def digest(self, task: str) -> str:
        kept = {name: tensor_digest(t) for name, t in self.networks.items() if name.startswith(f"{task}/")}
        return combined_digest(kept)
