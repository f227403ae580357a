"""Experience replay (Chaudhry et al., 2019)."""

from torch import Tensor

from exssnet.methods.base import Batch
from exssnet.methods.replay._memory import Replay


class ExperienceReplay(Replay):
    """Learn the new batch together with one drawn from a reservoir of earlier examples."""

    name = "er"

    def loss(self, batch: Batch) -> Tensor:
        loss = self.new_loss(batch)
        if self.tasks:
            old = self.recall(batch)
            loss = loss + self.old_loss(self.outputs(old.x), old.labels)
        self.remember(batch)
        return loss
