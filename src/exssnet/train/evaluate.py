"""Accuracy on a split, in whole batches and without augmentation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exssnet.core.engine import at_once
from exssnet.data.tasks import Data


def accuracy(logits: Callable[[Tensor], Tensor], data: Data) -> float:
    """Percent of the examples whose largest logit is the label."""
    correct = torch.zeros((), dtype=torch.int64, device=data.device)
    with torch.no_grad():
        every = torch.arange(len(data), device=data.device)
        for index in torch.split(every, at_once(data.shape, data.device)):
            x, y = data.batch(index)
            correct += (logits(x).argmax(1) == y).sum()
    return 100 * int(correct) / len(data)
