"""Conditional channel gated networks, the task being known (Abati et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from exssnet import randomness
from exssnet.core.layout import Layer, Layout
from exssnet.core.proof import combined_digest, tensor_digest
from exssnet.data.tasks import Data, Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, check_whole
from exssnet.methods.gates._base import GatedDense, GatedSettings
from exssnet.methods.gates._units import Gate, GatedLayer, Hidden
from exssnet.methods.shared.dense import Proved

TEMPERATURE = 2 / 3
OPEN = 3.0  # the bias of a new task's gates: nearly all of them open at first
BATCH = 500


@dataclass(frozen=True)
class CgateSettings(GatedSettings):
    """`sparsity` weighs the share of open gates; a unit open for over `frozen_share` of a task's examples is frozen."""

    sparsity: float = 0.3
    frozen_share: float = 0.0
    gate_units: int = 16

    may_be_zero = ("sparsity", "frozen_share")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, gate_units=1)
        if not self.frozen_share < 1:
            raise InputError(f"frozen_share is {self.frozen_share}: it must be at least 0 and below 1")


def opened(scores: Tensor) -> Tensor:
    """1 where a score is above zero, else 0; the gradient is that of σ(score / temperature)."""
    soft = torch.sigmoid(scores / TEMPERATURE)
    return (scores > 0).to(soft.dtype) + (soft - soft.detach())


class ChannelGate(Gate):
    """Every unit is let through or not, as a small network decides from the layer's input."""

    first: Tensor  # [gate units, inputs]
    first_bias: Tensor
    second: Tensor  # [units, gate units]
    second_bias: Tensor
    noise: Tensor  # [B, units] in training
    allowed: Tensor  # [units]

    def __init__(self, layer: Hidden, norm: nn.Module) -> None:
        super().__init__(layer, norm)
        for name in ("first", "first_bias", "second", "second_bias", "noise", "allowed"):
            self.register_buffer(name, torch.zeros(0))  # they come with every call
        self.open: Tensor | None = None

    def factors(self, x: Tensor) -> Tensor:
        axes = range(1, x.ndim - 1) if self.linear else range(2, x.ndim)
        mean = x.mean(tuple(axes)) if axes else x  # [B, inputs]
        scores = linear(relu(linear(mean, self.first, self.first_bias)), self.second, self.second_bias)
        self.open = opened(scores + self.noise) * self.allowed
        return self.open


class Watched(nn.Module):
    """A module that gives its gates [B, units] behind its outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.module(x)
        found: list[Tensor] = [getattr(outputs, "logits", outputs)]
        for part in self.modules():
            if isinstance(part, ChannelGate):
                assert part.open is not None
                found.append(part.open)
                part.open = None
        return torch.cat(found, 1)


class ConditionalGates(Proved, GatedDense):
    """Have a small network per task and layer choose the units for each example; freeze those a task ever uses.

    In training a gate is drawn: Gumbel-sigmoid, straight through. After a task every unit that opened for more than
    `frozen_share` of its training examples is frozen with all its weights, and the others start again. At test a task
    opens no unit that it did not freeze, so nothing is forgotten, bit for bit. The paper's gating networks also have a
    norm layer; these have none.
    """

    name = "cgate"
    settings_type = CgateSettings
    settings: CgateSettings
    gate = ChannelGate

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(Watched(module), *arguments, **options)
        self.layers = [replace(layer, source=None) for layer in self.layers]  # a kernel is frozen as a whole
        self.gate_layout = _gate_layout(self.layers, self.settings.gate_units)

    def loss(self, batch: Batch) -> Tensor:
        self.hold()
        drawn = torch.rand(len(batch), len(self.used), generator=batch.generator, device=batch.x.device)
        noise = torch.logit(drawn, eps=1e-6)  # the difference of two Gumbel variables
        outputs = self.outputs_with(batch, self._named(self.gates, noise, torch.ones_like(self.used)))
        return self.loss_of(outputs, batch) + self.settings.sparsity * self.open_share(outputs)

    def open_share(self, outputs: Tensor) -> Tensor:
        """The share of open gates, the mean over the layers."""
        gates = self.by_layer(outputs[:, self.outputs_of.size :])
        return torch.stack([layer.mean() for layer in gates]).mean()

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        allowed = self.relevance(task.train) > self.settings.frozen_share
        self.private[f"{task.name}/allowed"] = allowed
        self.used = torch.maximum(self.used, allowed.to(self.used))
        free = self.freedom(self.used, settled=True) > 0
        with torch.no_grad():
            self.network.weights.copy_(torch.where(free, self.network.start, self.network.weights))
        self.digests[task.name] = self.digest(task.name)

    def relevance(self, data: Data) -> Tensor:
        """For what share of the examples each unit is open: [units]."""
        total = torch.zeros_like(self.used)
        statistics = self.with_statistics(self.test_gates(self.gates, {}))
        with torch.no_grad():
            for index in torch.split(torch.arange(len(data), device=data.device), BATCH):
                outputs = self.network(data.batch(index)[0], training=False, statistics=statistics)
                total += outputs[:, self.outputs_of.size :].sum(0)
        return total / len(data)

    def fresh_gates(self, task: str) -> Tensor:
        draw = randomness.generator(self.seed, "gates", task)
        pieces = []
        for layer in self.gate_layout.layers:
            if layer.name.endswith("bias"):
                pieces.append(torch.full((layer.size,), OPEN * layer.name.endswith("second_bias")))
            else:
                bound = 1 / math.sqrt(layer.fan_in)
                pieces.append(nn.init.uniform_(torch.empty(layer.size), -bound, bound, generator=draw))
        return torch.cat(pieces)

    def test_gates(self, gates: Tensor, private: Mapping[str, Tensor]) -> dict[str, Tensor]:
        allowed = private["allowed"].to(gates) if private else torch.ones_like(self.used)
        return self._named(gates, torch.zeros_like(self.used), allowed)

    def _named(self, gates: Tensor, noise: Tensor, allowed: Tensor) -> dict[str, Tensor]:
        named = self.gate_layout.tensors(gates)
        for layer, drawn, kept in zip(self.layers, self.by_layer(noise), self.by_layer(allowed), strict=True):
            named |= {f"{layer.name}.noise": drawn, f"{layer.name}.allowed": kept}
        return named

    def digest(self, task: str) -> str:
        """Of all that a task computes with: the weights of the units it may open, and what is its own."""
        private = self.private_of(task)
        shared = self.freedom(private["allowed"].to(self.used), settled=True) == 0
        return combined_digest(
            {"weights": tensor_digest(self.network.weights[shared])}
            | {name: tensor_digest(tensor) for name, tensor in private.items()}
        )


def _gate_layout(gated: Sequence[GatedLayer], inner: int) -> Layout:
    """The gating networks of all layers as one vector, each with `inner` units."""
    layers: list[Layer] = []
    start = 0
    for at in gated:
        shapes: dict[str, tuple[int, ...]] = {"first": (inner, at.inputs), "first_bias": (inner,)}
        shapes |= {"second": (at.units, inner), "second_bias": (at.units,)}
        for short, shape in shapes.items():
            layers.append(Layer(f"{at.name}.{short}", shape, shape[-1], start))
            start = layers[-1].stop
    return Layout(tuple(layers))
