"""DER++ (Buzzega et al., 2020): dark experience replay that learns remembered labels as well."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exssnet.methods.base import Batch
from exssnet.methods.replay.der import DarkExperienceReplay, DerSettings


@dataclass(frozen=True)
class DerPlusSettings(DerSettings):
    """`beta` weighs the loss on the remembered labels."""

    beta: float = 0.5


class DarkExperienceReplayPlus(DarkExperienceReplay):
    """Stay near the stored outputs, and learn the labels of other remembered examples as well."""

    name = "der++"
    settings_type = DerPlusSettings
    settings: DerPlusSettings

    def replayed(self, batch: Batch) -> Tensor:
        old = self.recall(batch)
        labels = self.settings.beta * self.old_loss(self.outputs(old.x), old.labels)
        return super().replayed(batch) + labels
