"""Memory-based parameter adaptation (d'Autume et al., 2019).

Every example is kept, and before a text is answered its nearest neighbours are learned once more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from exssnet.data.tasks import Data, Task
from exssnet.data.text.tokens import shown
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Tensors, bits, check_whole
from exssnet.methods.text._base import AllClassText, TextSettings
from exssnet.models.text_classifier import TextClassifier

ADAPTS = ("head", "encoder")
AT_ONCE = 64  # texts that are read together where nothing is trained


@dataclass(frozen=True)
class MbpaSettings(TextSettings):
    """`every`: one batch of stored texts per this number of steps. For a text to predict, `adapt` (head or encoder)
    takes `steps` steps at `local_lr` on its `neighbours`, held to where it was by `strength`.

    The encoder is adapted for one text after the other: steps × neighbours passes each, for a few hundred texts.
    """

    every: int = 100
    neighbours: int = 32
    steps: int = 30
    local_lr: float = 0.01
    strength: float = 1e-3
    adapt: str = "head"

    may_be_zero: ClassVar[tuple[str, ...]] = ("clip", "strength")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, every=1, neighbours=1, steps=0)
        if self.adapt not in ADAPTS:
            raise InputError(f"adapt is '{self.adapt}': choose one of {', '.join(ADAPTS)}")


class Mbpa(AllClassText):
    """Fine-tune with sparse replay, and adapt to the nearest kept texts of each text that is asked for."""

    name = "mbpa++"
    settings_type = MbpaSettings
    settings: MbpaSettings
    network: TextClassifier
    steps: Tensor

    def prepare(self) -> None:
        super().prepare()
        frozen = copy.deepcopy(self.network.encoder).requires_grad_(False)
        self.reader = TextClassifier(frozen, 1, "first", self.generator("reader")).eval()
        self.kept = Tensors()  # "0.x", "0.y" and "0.key" of the first task: y are positions among the outputs
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._features: Tensor | None = None  # of all kept texts, as the encoder is now

    # --- learning --------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> Tensor:
        loss = self.new_loss(batch)
        self.steps += 1
        if self.tasks and int(self.steps) % self.settings.every == 0:
            draw = torch.rand(len(batch), generator=batch.generator, device=batch.generator.device)
            rows = (draw * len(self.labels())).long().to(batch.x.device)
            outputs = self.all_outputs(self.texts(rows), training=True)
            loss = loss + self.engine.cross_entropy(outputs, self.labels()[rows])
        return loss

    def end_task(self, task: Task) -> None:
        at, data = len(self.tasks), task.train
        rows = torch.arange(len(data), device=data.device)
        x, y = data.examples(rows), self.columns(at)[data.labels]
        self.kept.update({f"{at}.x": x, f"{at}.y": y, f"{at}.key": self._read(data)})
        self._features = None
        super().end_task(task)

    # --- answering -------------------------------------------------------------------------------------------

    def logits(self, x: Tensor, task: str) -> Tensor:
        return self.adapted(x)[:, self.columns(self.tasks.index(task))]

    def answers(self, x: Tensor) -> Tensor:
        return torch.tensor(self.numbers, device=x.device)[self.adapted(x).argmax(1)]

    def adapted(self, x: Tensor) -> Tensor:
        """All outputs [B, O], each text's after its own local adaptation."""
        near = self.nearest(x)
        if self.settings.adapt == "head":
            return self._with_heads(x, near)
        return torch.cat([self._with_encoders(x[row : row + 1], near[row]) for row in range(len(x))])

    @torch.no_grad()
    def nearest(self, x: Tensor) -> Tensor:
        """Which kept texts are nearest to each text, [B, K], by the [CLS] of the encoder as it came."""
        keys = torch.cat([self.kept[f"{at}.key"] for at in range(len(self.tasks))])
        count = min(self.settings.neighbours, len(keys))
        return torch.cdist(self.reader.features(x), keys).topk(count, largest=False).indices

    @torch.no_grad()
    def _with_heads(self, x: Tensor, near: Tensor) -> Tensor:
        """A head for each text: gradient descent on mean CE + λ‖W − W₀‖², whose gradient is (p − y)fᵀ + 2λ(W − W₀)."""
        network, of = self.network.eval(), self.settings
        f = _with_one(self._kept_features()[near])  # [B, K, width + 1]
        y = functional.one_hot(self.labels()[near], len(self.numbers)).to(f.dtype)
        start = torch.cat((network.head.weight, network.head.bias[:, None]), 1).expand(len(x), -1, -1)
        w = start
        for _ in range(of.steps):
            p = torch.softmax(f @ w.mT, 2)
            w = w - of.local_lr * ((p - y).mT @ f / f.shape[1] + 2 * of.strength * (w - start))
        return (w @ _with_one(network.features(x))[..., None])[..., 0]

    def _with_encoders(self, x: Tensor, near: Tensor) -> Tensor:
        """The outputs of one text after the whole network has been adapted; then it is what it was before."""
        network, of = self.network.eval(), self.settings
        trained = list(self.trained().values())
        start = [p.detach().clone() for p in trained]
        texts, labels = self.texts(near), self.labels()[near]
        try:
            with torch.enable_grad():
                for _ in range(of.steps):
                    way = torch.stack([(p - p0).square().sum() for p, p0 in zip(trained, start, strict=True)]).sum()
                    loss = functional.cross_entropy(network(texts), labels) + of.strength * way
                    gradients = torch.autograd.grad(loss, trained)
                    with torch.no_grad():
                        for p, gradient in zip(trained, gradients, strict=True):
                            p.sub_(gradient, alpha=of.local_lr)
            with torch.no_grad():
                out: Tensor = network(x)
        finally:
            with torch.no_grad():
                for p, p0 in zip(trained, start, strict=True):
                    p.copy_(p0)
        return out

    # --- the memory ------------------------------------------------------------------------------------------

    def labels(self) -> Tensor:
        """Of all kept texts, as positions among the outputs."""
        return torch.cat([self.kept[f"{at}.y"] for at in range(len(self.tasks))])

    def texts(self, rows: Tensor) -> Tensor:
        """Some of the kept texts, as the encoder takes them."""
        found, first = [], 0
        wanted = rows.tolist()
        starts = []
        for at in range(len(self.tasks)):
            starts.append(first)
            first += len(self.kept[f"{at}.y"])
        for row in wanted:
            at = max(task for task, start in enumerate(starts) if start <= row)
            found.append(self.kept[f"{at}.x"][row - starts[at]])
        return shown(torch.stack(found))

    @torch.no_grad()
    def _kept_features(self) -> Tensor:
        """What the head sees of all kept texts; computed once after each task."""
        if self._features is None:
            self.network.eval()
            whole = [self.kept[f"{at}.x"] for at in range(len(self.tasks))]
            parts = [part for x in whole for part in torch.split(x, AT_ONCE)]
            self._features = torch.cat([self.network.features(shown(part)) for part in parts])
        return self._features

    @torch.no_grad()
    def _read(self, data: Data) -> Tensor:
        """Keys of a task's texts."""
        rows = torch.arange(len(data), device=data.device)
        return torch.cat([self.reader.features(data.batch(some)[0]) for some in torch.split(rows, AT_ONCE)])

    # --- what a run and the loop ask for ---------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return {name: t for name, t in tensors.items() if not name.startswith("reader.")}, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self._features = None

    def storage(self) -> dict[str, int]:
        return super().storage() | {"memory_bits": bits(self.kept.values())}


def _with_one(features: Tensor) -> Tensor:
    """Features and a 1 that the bias is multiplied with."""
    return torch.cat((features, features.new_ones(*features.shape[:-1], 1)), -1)
