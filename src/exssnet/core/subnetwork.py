"""A task's subnetwork while it is being learned. `parameters()` is all that may move.

Phase 1 learns scores, whose largest make the mask. Phase 2 learns the values of chosen weights in the mask; the
others are not parameters, so no optimizer, momentum or weight decay can reach them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from exssnet.core.engine import Weights
from exssnet.core.init import fresh_scores
from exssnet.core.network import LearnedTask, MaskedNetwork
from exssnet.core.selection import keep_only, select
from exssnet.errors import InputError


class Subnetwork(ABC):
    """A mask over the shared weights, and tensors of the task's own."""

    def __init__(self, network: MaskedNetwork, task: str, classes: int, own: dict[str, Tensor]) -> None:
        self.network, self.task, self.classes, self.own = network, task, classes, own
        self._runner = network.runner

    @abstractmethod
    def weights(self) -> Weights:
        """The shared weights as this subnetwork sees them, by layer; differentiable in the parameters.

        Good until the next call, which may write to the same memory.
        """

    @abstractmethod
    def mask(self) -> Tensor:
        """The bits (bool vector)."""

    @abstractmethod
    def _learned(self) -> list[Tensor]: ...

    def parameters(self) -> list[Tensor]:
        return [p for p in (*self._learned(), *self.own.values()) if p.requires_grad and p.numel()]

    def buffers(self) -> dict[str, Tensor]:
        """The own tensors that move without a gradient: norm statistics."""
        return {name: tensor for name, tensor in self.own.items() if not tensor.requires_grad}

    def logits(self, x: Tensor, *, training: bool) -> Tensor:
        if self.network.runner is not self._runner:
            raise InputError("the network was told to compute another way while a task was being learned")
        return self.network.run(self.weights(), self.own, self.classes, x, training=training)


class ScoredSubnetwork(Subnetwork):
    """Phase 1: the mask is where |scores| are largest."""

    def __init__(self, network: MaskedNetwork, task: str, classes: int, scores: Tensor | None = None) -> None:
        network.check_new(task, classes)
        super().__init__(network, task, classes, network.start_private(task, classes))
        if scores is None:
            scores = fresh_scores(network.layout, network.seed, task)
        self.scores = scores.to(network.weights).clone().requires_grad_()
        self._select = network.runner.selection(network.keep)

    def weights(self) -> Weights:
        return self._select(self.scores, self.network.weights)

    def mask(self) -> Tensor:
        return select(self.scores, self.network.layout, self.network.keep)

    def _learned(self) -> list[Tensor]:
        return [self.scores]


class OwnSubnetwork(Subnetwork):
    """The mask is fixed; of its weights, those at `index` are learned, from `values` on."""

    def __init__(
        self, network: MaskedNetwork, task: str, classes: int, own: dict[str, Tensor], mask: Tensor, index: Tensor,
        values: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(network, task, classes, own)
        self._mask, self.index = mask, index
        self.values = values.detach().clone().requires_grad_()
        self._put = network.runner.trained(keep_only(network.weights, mask), index)

    @classmethod
    def dense(cls, network: MaskedNetwork, task: str, classes: int) -> OwnSubnetwork:
        """All weights run, and those that no task uses yet are learned."""
        network.check_new(task, classes)
        index = (~network.bank.used).nonzero().view(-1)
        every = torch.ones_like(network.bank.used)
        own = network.start_private(task, classes)
        return cls(network, task, classes, own, every, index, network.weights[index])

    def pruned(self, kept: Tensor) -> OwnSubnetwork:
        """The same with only these of its learned weights; what it did not learn stays."""
        learned = torch.zeros_like(kept)
        learned[self.index] = True
        chosen = kept[self.index]
        mask = self._mask & (kept | ~learned)
        return OwnSubnetwork(
            self.network, self.task, self.classes, self.own, mask, self.index[chosen], self.values[chosen]
        )

    def vector(self) -> Tensor:
        """The shared weights with the learned values among them."""
        return self.network.weights.index_put((self.index,), self.values.detach())

    def weights(self) -> Weights:
        return self._put(self.values)

    def mask(self) -> Tensor:
        return self._mask

    def _learned(self) -> list[Tensor]:
        return [self.values]

    def commit(self, *, lender: str | None = None, exclusive: bool = True) -> LearnedTask:
        """Add the task, as it is now, to the network for good."""
        return self.network.commit(
            self.task, self.classes, self._mask, self.index, self.values, self.own, lender=lender, exclusive=exclusive
        )


class WeightSubnetwork(OwnSubnetwork):
    """Phase 2: the mask is that of the scores; of its weights, those in `trainable` are learned."""

    def __init__(self, scored: ScoredSubnetwork, trainable: Tensor | None) -> None:
        network, mask = scored.network, scored.mask()
        counts = [int(piece.count_nonzero()) for piece in network.layout.slices(mask)]
        if counts != list(network.keep):
            raise InputError(f"the scores of task '{scored.task}' are not numbers any more: lower the learning rate")
        chosen = torch.zeros_like(mask) if trainable is None else trainable & mask
        index = chosen.nonzero().view(-1)
        super().__init__(network, scored.task, scored.classes, scored.own, mask, index, network.weights[index])
