"""PackNet (Mallya and Lazebnik, "PackNet: Adding Multiple Tasks to a Single Network by Iterative Pruning", 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exssnet.core.subnetwork import OwnSubnetwork
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase, check_whole
from exssnet.methods.masks._base import Isolated
from exssnet.methods.masks._subnetworks import largest_free
from exssnet.methods.shared.dense import DenseSettings


@dataclass(frozen=True)
class PackNetSettings(DenseSettings):
    """`density` is the share of each layer that a task may keep; `retrain_*` is what follows the pruning."""

    density: float = 0.1
    epochs: int = 20
    retrain_epochs: int = 10
    retrain_lr: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, retrain_epochs=0)

    @property
    def epochs_per_task(self) -> int:
        return self.epochs + self.retrain_epochs

    @classmethod
    def of_epochs(cls, epochs: int) -> dict[str, int]:
        retrain = max(epochs // 3, min(epochs - 1, 1))
        return {"epochs": epochs - retrain, "retrain_epochs": retrain}


class PackNet(Isolated):
    """Train all free weights, keep the largest, train these again; earlier tasks' weights are used as they are.

    In the paper a pruned weight is zero when the next task begins; here it has its initial value, which need not be
    stored. The paper stores an owner for each weight, from which the masks follow, since each holds those before it;
    here, as for the other methods, a bit per weight and task is counted. Where a layer has no free weight left, a task
    uses what there is.
    """

    name = "packnet"
    heads = ("task", "shared")
    settings_type = PackNetSettings
    settings: PackNetSettings

    def phases(self, task: Task) -> Iterator[Phase]:
        network, settings = self.network, self.settings
        self.subnetwork = dense = OwnSubnetwork.dense(*self.begin(task))
        if dense.parameters():
            yield Phase("train", dense.parameters(), settings.epochs, settings.lr)
        kept = largest_free(dense.vector(), ~network.bank.used, network.layout, network.keep)
        self.subnetwork = pruned = dense.pruned(kept)
        if pruned.parameters() and settings.retrain_epochs:
            yield Phase("retrain", pruned.parameters(), settings.retrain_epochs, settings.retrain_lr)
