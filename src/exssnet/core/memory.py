"""Memory that stays from step to step, and is handed out as tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any]
Shapes = Sequence[tuple[int, ...]]


def aligned_zeros(size: int, dtype: Any) -> Numbers:
    """Where torch puts them, at the beginning of a cache line. NumPy does not, and every wide load would touch two."""
    zeros: Numbers = torch.zeros(size, dtype=getattr(torch, np.dtype(dtype).name)).numpy()
    return zeros


def in_one_piece(tensors: Sequence[Tensor], addresses: Numbers) -> list[Tensor]:
    """The tensors, each in order, and where they are; to be kept for as long as the addresses are used."""
    pieces = [tensor.contiguous() for tensor in tensors]
    for number, piece in enumerate(pieces):
        addresses[number] = piece.data_ptr()
    return pieces


class Memory:
    """A vector, and the parts of it that are handed out as tensors."""

    def __init__(self, shapes: Shapes, dtype: Any) -> None:
        ends = np.cumsum([prod(shape) for shape in shapes])
        self.vector = aligned_zeros(ends[-1], dtype)
        pieces = np.split(self.vector, ends[:-1])
        self._parts = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self._unheld = self._holders()

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, self._parts))

    @property
    def held(self) -> bool:
        """Whether somebody still has such a tensor, or another one of the same memory."""
        return self._holders() != self._unheld

    def _holders(self) -> list[int]:
        return list(map(sys.getrefcount, self._parts))  # a tensor's memory holds the array it was made of
