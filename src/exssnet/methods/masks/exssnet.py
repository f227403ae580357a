"""ExSSNeT: a supermask, then the weights in it that no earlier task uses."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from exssnet.core.subnetwork import WeightSubnetwork
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase
from exssnet.methods.masks.supsup import MaskSettings, SupSup


class ExSSNeT(SupSup):
    """Find a supermask, then train the weights in it that no earlier task uses."""

    name = "exssnet"

    settings_type = MaskSettings

    def phases(self, task: Task) -> Iterator[Phase]:
        yield from super().phases(task)
        assert isinstance(self.subnetwork, WeightSubnetwork)
        if len(self.subnetwork.index):  # with no free weight left, this is SupSup
            weights = self.subnetwork.parameters()
            yield Phase("weights", weights, self.settings.weight_epochs, self.settings.weight_lr)

    def trainable(self, mask: Tensor) -> Tensor | None:
        return self.network.bank.free(mask) if self.settings.weight_epochs else None

    def paper_weight_bits(self) -> int:
        size = self.network.layout.size
        return 32 * min(round(size * self.settings.density * len(self.network.tasks)), size)
