"""Hard attention to the task (Serrà et al., 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exssnet import randomness
from exssnet.data.tasks import Task
from exssnet.methods.base import Batch, Phase
from exssnet.methods.gates._base import GatedDense, GatedSettings
from exssnet.methods.gates._units import Gate, Hidden

BOUND = 6.0  # of an embedding


@dataclass(frozen=True)
class HatSettings(GatedSettings):
    """`s_max` is the steepest attention, `strength` weighs the price of attention.

    `gate_rate` is for Adam, whose steps do not grow with the gradient: the paper's SGD has embeddings go s_max times as
    far as their slope says.
    """

    s_max: float = 400.0
    strength: float = 0.75
    gate_rate: float = 30.0


class Attention(Gate):
    """Every unit times its attention, the same for all examples of a task."""

    def __init__(self, layer: Hidden, norm: nn.Module) -> None:
        super().__init__(layer, norm)
        self.attention: Tensor
        self.register_buffer("attention", torch.ones(self.units))

    def factors(self, x: Tensor) -> Tensor:
        return self.attention


def attention(embedding: Tensor, s: Tensor, s_max: float) -> Tensor:
    """σ(s·e), with the paper's compensated gradient.

    The paper multiplies the gradient by s_max/s · (cosh(s·e) + 1)/(cosh(e) + 1), e being bounded. Of the derivative
    s·σ'(s·e) = s/(2·(cosh(s·e) + 1)) that leaves s_max·σ'(e), which is said here without the overflow on the way.
    """
    slope = s_max * torch.sigmoid(embedding)
    return torch.sigmoid(s * embedding).detach() + (slope - slope.detach())


class Hat(GatedDense):
    """Learn with which units a task is solved, and hold the weights between them for it.

    A weight's step is scaled by 1 − min(a_out, a_in), a being the largest attention of an earlier task. Where a layer's
    inputs are not the units of exactly one gated layer (images, residual sums, what no Sequential shows) it is scaled
    by 1 − a_out: all weights into a used unit are held. Attention strictly between 0 and 1 holds in part, so earlier
    tasks move: how far is said in `docs/design/methods.md`.
    """

    name = "hat"
    settings_type = HatSettings
    settings: HatSettings
    gate = Attention
    shown: Tensor  # examples of this epoch

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("shown", torch.zeros((), dtype=torch.int64), persistent=False)

    def loss(self, batch: Batch) -> Tensor:
        self.hold()
        a = attention(self.gates, self.steepness(batch), self.settings.s_max)
        loss = self.loss_of(self.outputs_with(batch, self._named(a)), batch)
        unused = 1 - self.used
        return loss + self.settings.strength * (a * unused).sum() / unused.sum().clamp(min=1e-6)

    def steepness(self, batch: Batch) -> Tensor:
        """From 1/s_max in an epoch's first batch in a line to s_max in its last; counted where a captured step can."""
        examples, size, s_max = len(batch.data), len(batch), self.settings.s_max
        last = examples - size - (examples % size == 1)  # where the last batch begins; a single example is left out
        share = (self.shown / last).clamp(max=1) if last else torch.ones_like(self.shown)
        self.shown.copy_((self.shown + size) * (self.shown < last))  # after the last batch an epoch begins
        return 1 / s_max + (s_max - 1 / s_max) * share

    def hold(self) -> None:
        super().hold()
        with torch.no_grad():
            self.last_gates.copy_(self.gates.clamp_(-BOUND, BOUND))

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        self.used = torch.maximum(self.used, torch.sigmoid(self.settings.s_max * self.gates.detach()))

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            self.shown.zero_()
            yield phase

    def fresh_gates(self, task: str) -> Tensor:
        return torch.randn(len(self.used), generator=randomness.generator(self.seed, "embedding", task))

    def test_gates(self, gates: Tensor, private: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._named(torch.sigmoid(self.settings.s_max * gates))

    def _named(self, attention: Tensor) -> dict[str, Tensor]:
        pieces = zip(self.layers, self.by_layer(attention), strict=True)
        return {f"{layer.name}.attention": piece for layer, piece in pieces}
