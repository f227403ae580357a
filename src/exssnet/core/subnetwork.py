"""A task's subnetwork while it is being learned. `parameters()` is all that may move.

Phase 1 learns scores, whose largest make the mask. Phase 2 learns the values of chosen weights in the mask; the
others are not parameters, so no optimizer, momentum or weight decay can reach them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exssnet.core import init as initialise
from exssnet.core.network import LearnedTask, MaskedNetwork
from exssnet.core.selection import keep_only, masked_weights, select, step_selector
from exssnet.engine.cpu.selection_cpu import CpuSelector
from exssnet.engine.kernels import has_kernels
from exssnet.errors import InputError

if TYPE_CHECKING:
    from exssnet.engine.cpu.values_numba import LearnedWeights
    from exssnet.engine.cuda.values_triton import LearnedOnGpu


class Subnetwork(ABC):
    """A mask over the shared weights, and tensors of the task's own."""

    def __init__(self, network: MaskedNetwork, task: str, classes: int, own: dict[str, Tensor]) -> None:
        self.network, self.task, self.classes, self.own = network, task, classes, own
        self._arrangement = network.arrangement  # what the subclasses' tensors are made for

    @abstractmethod
    def arranged(self) -> Tensor:
        """The shared weights as this subnetwork sees them, arranged to run; differentiable in the parameters.

        Good until the next call, which may write to the same memory.
        """

    @abstractmethod
    def mask(self) -> Tensor:
        """The bits (bool vector)."""

    @abstractmethod
    def _learned(self) -> Tensor: ...

    def parameters(self) -> list[Tensor]:
        return [self._learned(), *(t for t in self.own.values() if t.requires_grad)]

    def buffers(self) -> dict[str, Tensor]:
        """The own tensors that move without a gradient: norm statistics."""
        return {name: tensor for name, tensor in self.own.items() if not tensor.requires_grad}

    def logits(self, x: Tensor, *, training: bool) -> Tensor:
        if self.network.arrangement is not self._arrangement:
            raise InputError("the network was told to compute another way while a task was being learned")
        return self.network.run(self.layers(), self.own, self.classes, x, training=training)

    def layers(self) -> dict[str, Tensor]:
        """The same by layer."""
        return self.network.layers(self.arranged())


class ScoredSubnetwork(Subnetwork):
    """Phase 1: the mask is where |scores| are largest."""

    def __init__(self, network: MaskedNetwork, task: str, classes: int, scores: Tensor | None = None) -> None:
        network.check_new(task, classes)
        super().__init__(network, task, classes, network.start_private(task, classes))
        if scores is None:
            scores = initialise.fresh_scores(network.layout, network.seed, task)
        self.scores = scores.to(network.weights).clone().requires_grad_()

        self._selector = step_selector(network.arrangement, network.keep, network.weights)

    def arranged(self) -> Tensor:
        net = self.network
        if isinstance(self._selector, CpuSelector):
            return net.arrangement(self._selector.masked_weights(self.scores, net.weights))
        if self._selector is not None:
            return self._selector.masked_weights(self.scores, net.weights, net.execution.autocast or net.weights.dtype)
        return net.arrangement(masked_weights(self.scores, net.weights, net.layout, net.keep))

    def layers(self) -> dict[str, Tensor]:
        net = self.network
        if isinstance(self._selector, CpuSelector) and net.execution.autocast is None:
            return self._selector.masked_layers(self.scores, net.weights)
        return super().layers()

    def mask(self) -> Tensor:
        return select(self.scores, self.network.layout, self.network.keep)

    def _learned(self) -> Tensor:
        return self.scores


class OwnSubnetwork(Subnetwork):
    """The mask is fixed; of its weights, those at `index` are learned, from `values` on."""

    def __init__(
        self, network: MaskedNetwork, task: str, classes: int, own: dict[str, Tensor], mask: Tensor, index: Tensor,
        values: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(network, task, classes, own)
        self._mask, self.index = mask, index
        self.values = values.detach().clone().requires_grad_()
        self._dtype = network.execution.autocast or network.weights.dtype
        self._fixed = network.arrangement(keep_only(network.weights, mask)).to(self._dtype)
        self._places = network.arrangement.places[index]

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

    def weights(self) -> Tensor:
        """The shared weights with the learned values among them."""
        return self.network.weights.index_put((self.index,), self.values.detach())

    def arranged(self) -> Tensor:
        if self._on_gpu is not None:
            return self._on_gpu.vector(self.values)
        return self._fixed.index_put((self._places,), self.values.to(self._dtype))

    def layers(self) -> dict[str, Tensor]:
        fast = self._learned_weights
        return super().layers() if fast is None else fast.by_layer(self.values)

    @cached_property
    def _on_gpu(self) -> LearnedOnGpu | None:
        """What puts learned values in their places in the vector in one launch; None where there is no such thing."""
        if not has_kernels(self.values, torch.float32):
            return None
        from exssnet.engine.cuda.values_triton import LearnedOnGpu

        return LearnedOnGpu(self._fixed, self._places)

    @cached_property
    def _learned_weights(self) -> LearnedWeights | None:
        """What puts learned values in their places in the layers, on a CPU; None where there is no such thing."""
        net, index = self.network, self.index
        if net.weights.device.type != "cpu" or net.arrangement.filled or net.execution.autocast is not None:
            return None
        if not bool((index[1:] > index[:-1]).all() and self._mask[index].all()):
            return None
        try:
            from exssnet.engine.cpu.values_numba import LearnedWeights
        except ImportError:  # no numba, or one that does not fit this numpy
            return None
        return LearnedWeights(net.arrangement, self._fixed, self._mask, index)

    def mask(self) -> Tensor:
        return self._mask

    def _learned(self) -> Tensor:
        return self.values

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in super().parameters() if parameter.numel()]  # none where all are used

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
            raise InputError(f"the scores of task '{scored.task}' are no numbers any more: lower the learning rate")
        chosen = torch.zeros_like(mask) if trainable is None else trainable & mask
        index = chosen.nonzero().view(-1)
        super().__init__(network, scored.task, scored.classes, scored.own, mask, index, network.weights[index])
