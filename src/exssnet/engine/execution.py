"""How a network computes, as apart from what: number type, order of memory, compiled or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Execution:
    """The plain way by default: the module's own number type and order of memory, no compiler."""

    autocast: torch.dtype | None = None  # bfloat16: weights are cast once, as one vector
    channels_last: bool = False  # 2-D convolutions
    channel_multiple: int = 1  # fill their channels up to a multiple of this
    narrow: int = 0  # but leave those of at most so many channels to kernels of our own
    masked_linear: bool = False  # pass over the weights that masks leave out of large Linear layers
    compiled_batch: int = 0  # compile the training step for batches of this size; 0: do not
    structure: str = ""  # networks that give the same name here are built alike, and share what is compiled


EVALUATED = 500  # inputs in a batch that is not trained on, at most; on a GPU kernels depend on how many there are
FEWEST = 16  # on a CPU
NEAR = 3 << 17  # numbers in such a batch there: more, and what layers pass on does not stay in its caches


def at_once(shape: Sequence[int], device: torch.device) -> int:
    """How many inputs of this shape to compute at once where nothing is trained."""
    if device.type != "cpu":
        return EVALUATED
    return min(max(NEAR // max(prod(shape), 1), FEWEST), EVALUATED)


PLAIN = Execution()
CPU = Execution(channels_last=True, masked_linear=True)
CUDA = Execution(torch.bfloat16, channels_last=True, channel_multiple=8, narrow=192, compiled_batch=64)
