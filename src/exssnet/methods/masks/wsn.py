"""WSN (Kang, Mina, Madjid, Yoon, Hasegawa-Johnson, Hwang and Yoo, "Forget-free Continual Learning with Winning
Subnetworks", 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exssnet.core.init import fresh_scores
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase, bits
from exssnet.methods.shared.dense import DenseSettings
from exssnet.methods.shared.mask_subnetworks import WinningSubnetwork
from exssnet.methods.shared.masked import Isolated


@dataclass(frozen=True)
class WsnSettings(DenseSettings):
    """`density` is the share of each layer that a task selects."""

    density: float = 0.1


class WinningSubnetworks(Isolated):
    """Train weights and scores together; a task's mask is where its scores are largest, old weights included.

    As in the paper the scores go on from task to task, so that a task begins with the mask of the one before. They are
    kept for learning alone, and counted as what is kept, like the Fisher information of EWC. Weights that the task
    trained but did not select return to their initial value, where the paper has them go on from where training left
    them: so the network is its seed and the weights in masks, all of it under the proof and none stored in vain.
    """

    name = "wsn"
    heads = ("task", "shared")
    settings_type = WsnSettings
    settings: WsnSettings

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scores: Tensor | None = None  # as the last task left them

    @staticmethod
    def planned_epochs(settings: WsnSettings) -> int:
        return settings.epochs

    def phases(self, task: Task) -> Iterator[Phase]:
        scores = self.scores if self.scores is not None else fresh_scores(self.network.layout, self.seed, task.name)
        self.subnetwork = winning = WinningSubnetwork(self.network, task.name, task.train.classes, scores)
        yield Phase("train", winning.parameters(), self.settings.epochs, self.settings.lr)
        self.scores = winning.scores.detach()
        self.subnetwork = winning.fixed()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors | ({"scores": self.scores} if self.scores is not None else {}), facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self.scores = tensors.get("scores")

    def storage(self) -> dict[str, int]:
        return super().storage() | {"score_bits": bits([] if self.scores is None else [self.scores])}
