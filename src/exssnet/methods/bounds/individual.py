"""A network of its own for each task: nothing is forgotten, nothing shared, and the storage grows with every task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from exssnet.core.proof import combined_digest, tensor_digest
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase, Tensors, bits
from exssnet.methods.shared.dense import Proved


class Individual(Proved):
    """Train a new network for each task: the bound for methods that share one."""

    name = "individual"
    heads = ("shared", "task", "masked-test")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.networks = Tensors()  # weights and statistics, by task and name

    def phases(self, task: Task) -> Iterator[Phase]:
        self.network.reset()
        yield from super().phases(task)

    def end_task(self, task: Task) -> None:
        self.networks[f"{task.name}/weights"] = self.network.weights.detach().clone()
        statistics = self.network.statistics.items()
        self.networks.update({f"{task.name}/buffer/{name}": tensor.clone() for name, tensor in statistics})
        self.digests[task.name] = self.digest(task.name)
        super().end_task(task)

    def logits(self, x: Tensor, task: str) -> Tensor:
        weights, statistics = self.networks[f"{task}/weights"], self.networks.below(f"{task}/buffer/")
        with torch.no_grad():
            outputs: Tensor = self.network(x, training=False, weights=weights, statistics=statistics)
        return outputs[:, self.outputs_of.slices[self.tasks.index(task)]]

    def storage(self) -> dict[str, int]:
        return {"weight_bits": bits(self.networks.values())}  # the network being trained is not one of them

    def digest(self, task: str) -> str:
        kept = {name: tensor_digest(t) for name, t in self.networks.items() if name.startswith(f"{task}/")}
        return combined_digest(kept)
