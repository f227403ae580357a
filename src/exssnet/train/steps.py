"""A step of training, the whole of it: gather and augment the batch, forward, backward, the method's own change of
gradients, the optimizer, the counters. An engine runs it over an epoch, or captures it once and replays it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet.core.engine import Progress
from exssnet.data.tasks import Data
from exssnet.methods.base import Batch, Method, Phase


class Steps:
    """The steps of one phase on one task's data."""

    def __init__(
        self, method: Method, data: Data, phase: Phase, optimizer: Optimizer, batch_size: int,
        named_optimizer: bool = True,
    ) -> None:  # fmt: skip
        self.method, self.data, self.phase, self.optimizer = method, data, phase, optimizer
        self.name, self.examples = f"{type(method).__name__}, phase {phase.name}", len(data)
        self.sizes = batch_sizes(len(data), batch_size)
        self.total = torch.zeros(2, device=data.device)  # summed loss, correct answers
        self.generator = torch.Generator(device=data.device)  # of the augmentation
        self._fixed = data.capturable and named_optimizer  # an optimizer of the user's may look at values
        self.loop = method.engine.loop(self)

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured, as far as is known."""
        return self._fixed and self.method.capturable

    @capturable.setter
    def capturable(self, found: bool) -> None:
        self.method.capturable = found

    def epoch(self, order: Tensor, lr: float, seed: int, progress: Progress) -> tuple[float, float]:
        """One pass over the data in this order; mean loss, and accuracy in percent over the batches as they came."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.generator.manual_seed(seed)
        self.total.zero_()
        self.loop.epoch(order, progress)
        mean, correct = (self.total / sum(self.sizes)).tolist()
        return mean, 100 * correct

    def __call__(self, index: Tensor) -> None:
        batch = Batch(*self.data.batch(index, self.generator), self.data, index, self.generator)
        loss = self.method.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.method.after_backward()
        self.optimizer.step()
        assert batch.logits is not None
        self.method.engine.count(self.total, loss, batch.logits, batch.y)

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def moving(self) -> list[Tensor]:
        return [self.total, *self.phase.parameters, *self.method.moving().values()]

    def optimizer_state(self) -> list[Tensor]:
        return [value for state in self.optimizer.state.values() for value in state.values()]


def batch_sizes(examples: int, batch_size: int) -> list[int]:
    """Sizes of an epoch's batches; a last batch of one is left out, since batch statistics need two."""
    full, rest = divmod(examples, batch_size)
    return [batch_size] * full + ([rest] if rest > 1 or not full else [])
