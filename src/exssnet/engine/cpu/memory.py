"""Memory that stays from step to step, and is handed out as tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any]


class Part(NamedTuple):
    """How a piece of memory is handed out: as a tensor of this shape, in the plain or the channels-last order."""

    shape: tuple[int, ...]
    channels_last: bool = False

    def view(self, piece: Tensor) -> Tensor:
        if not self.channels_last:
            return piece.view(self.shape)
        out, channels, height, width = self.shape
        return piece.view(out, height, width, channels).permute(0, 3, 1, 2)

    def in_order(self, tensor: Tensor) -> Tensor:
        """The same numbers, one after the other as in such a piece."""
        order = torch.channels_last if self.channels_last else torch.contiguous_format
        return tensor.contiguous(memory_format=order)


def aligned_zeros(size: int, dtype: Any) -> Numbers:
    """Where torch puts them, at the beginning of a cache line. NumPy does not, and every wide load would touch two."""
    zeros: Numbers = torch.zeros(size, dtype=getattr(torch, np.dtype(dtype).name)).numpy()
    return zeros


def in_one_piece(tensors: Sequence[Tensor], parts: Sequence[Part], addresses: Numbers) -> list[Tensor]:
    """The tensors, each in its part's order, and where they are; to be kept for as long as the addresses are used."""
    pieces = [part.in_order(tensor) for tensor, part in zip(tensors, parts, strict=True)]
    for number, piece in enumerate(pieces):
        addresses[number] = piece.data_ptr()
    return pieces


class Memory:
    """A vector; it and the parts of it are handed out as tensors."""

    def __init__(self, parts: Sequence[Part], dtype: Any) -> None:
        ends = np.cumsum([prod(part.shape) for part in parts])
        self.vector = aligned_zeros(ends[-1], dtype)
        pieces = map(torch.from_numpy, np.split(self.vector, ends[:-1]))
        self._parts = [part.view(piece).numpy() for piece, part in zip(pieces, parts, strict=True)]
        self._whole = self.vector.view()
        self._unheld = self._holders()

    def tensors(self) -> tuple[Tensor, ...]:
        """All parts."""
        return tuple(map(torch.from_numpy, self._parts))

    def part(self, number: int) -> Tensor:
        return torch.from_numpy(self._parts[number])

    def whole(self) -> Tensor:
        return torch.from_numpy(self._whole)

    @property
    def held(self) -> bool:
        """Whether somebody still has such a tensor, or another one of the same memory."""
        return self._holders() != self._unheld

    def _holders(self) -> list[int]:
        # a tensor's memory holds the array it was made of
        return list(map(sys.getrefcount, [*self._parts, self._whole]))
