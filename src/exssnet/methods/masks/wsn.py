"""WSN (Kang, Mina, Madjid, Yoon, Hasegawa-Johnson, Hwang and Yoo, "Forget-free Continual Learning with Winning
Subnetworks", 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exssnet.core.init import fresh_scores
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase, Tensors, bits
from exssnet.methods.masks._base import Isolated
from exssnet.methods.masks._subnetworks import WinningSubnetwork
from exssnet.methods.shared.dense import DenseSettings


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
        self.scores = Tensors()  # one vector, as the last task left it

    def phases(self, task: Task) -> Iterator[Phase]:
        new, scores = self.begin(task), self.scores.get("last")
        if scores is None:
            scores = fresh_scores(self.network.layout, self.seed, task.name)
        self.subnetwork = winning = WinningSubnetwork(*new, scores)
        yield Phase("train", winning.parameters(), self.settings.epochs, self.settings.lr)
        self.scores["last"] = winning.scores.detach()
        self.subnetwork = winning.fixed()

    def storage(self) -> dict[str, int]:
        return super().storage() | {"score_bits": bits(self.scores.values())}
