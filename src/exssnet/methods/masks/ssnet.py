"""SSNeT: a supermask, then all the weights in it. It forgets: later tasks overwrite what earlier ones share."""

from __future__ import annotations

from torch import Tensor

from exssnet.methods.masks.exssnet import ExSSNeT


class SSNeT(ExSSNeT):
    """Find a supermask, then train all its weights, also those that earlier tasks use."""

    name = "ssnet"
    exclusive = False

    def trainable(self, mask: Tensor) -> Tensor | None:
        return mask if self.settings.weight_epochs else None

    def trained_weights(self) -> int:
        return int(self.network.bank.used.count_nonzero()) if self.settings.weight_epochs else 0
