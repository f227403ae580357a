"""The loss of classification and the count of right answers; on a GPU in a launch each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from exssnet.engine.kernels import has_kernels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the batch."""
    if _fast(logits):
        from exssnet.engine.cuda.loss_triton import CrossEntropy

        loss: Tensor = CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
        return loss
    return functional.cross_entropy(logits, labels)


def count(total: Tensor, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add a batch to the totals [2]: its summed loss, its right answers."""
    with torch.no_grad():
        if _fast(logits):
            from exssnet.engine.cuda import loss_triton

            loss_triton.count(total, loss, logits, labels)
            return
        total[0] += loss.detach() * len(labels)
        total[1] += (logits.detach().argmax(1) == labels).sum()


def _fast(logits: Tensor) -> bool:
    if not has_kernels(logits, torch.float32):
        return False
    from exssnet.engine.cuda.loss_triton import fits

    return fits(logits)
