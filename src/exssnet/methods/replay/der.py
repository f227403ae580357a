"""Dark experience replay (Buzzega et al., 2020): remember what the network answered, not only what is right."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exssnet.methods.base import Batch
from exssnet.methods.replay._memory import Old, Replay, ReplaySettings


@dataclass(frozen=True)
class DerSettings(ReplaySettings):
    """`alpha` weighs the difference to the answers that were stored."""

    alpha: float = 0.3


class DarkExperienceReplay(Replay):
    """Stay near the outputs that remembered examples had when they were stored."""

    name = "der"
    settings_type = DerSettings
    settings: DerSettings
    keeps_targets = True

    def loss(self, batch: Batch) -> Tensor:
        loss = self.new_loss(batch)
        if self.tasks:
            loss = loss + self.replayed(batch)
        self.remember(batch)
        return loss

    def replayed(self, batch: Batch) -> Tensor:
        old = self.recall(batch)
        return self.settings.alpha * self.distance(self.outputs(old.x), old)

    def distance(self, outputs: Tensor, old: Old) -> Tensor:
        """The mean square, over the outputs that an example is trained on."""
        trained = self.rivals[old.labels]
        return ((outputs - old.targets).square() * trained).sum() / trained.sum()
