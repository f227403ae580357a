"""The masks of all tasks, one bit per weight and task, and what follows from them: used, free, overlap, owners.

The union of all masks is kept and updated with each task, so a question about "used" never walks the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from exssnet.errors import InputError


@cache
def _bits_of_a_byte(device: torch.device) -> Tensor:
    """The bits of a byte, the lowest first."""
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def pack(mask: Tensor) -> Tensor:
    """Bits of a bool vector, eight to a byte (uint8), the first bit lowest; padded with zeros."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (bits * _bits_of_a_byte(mask.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, size: int) -> Tensor:
    """The bool vector of the given length that `pack` packed, or several, one in a row."""
    return (packed[..., None] & _bits_of_a_byte(packed.device)).bool().flatten(-2)[..., :size]


class Bank:
    """A list of masks over one vector of weights, in the order of the tasks."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.used = torch.zeros(size, dtype=torch.bool, device=device)  # union of all masks
        self._packed: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._packed)

    def add(self, mask: Tensor) -> None:
        if mask.dtype != torch.bool or mask.shape != (self.size,):
            raise InputError(f"a mask must be {self.size} bools, not {mask.dtype} of shape {tuple(mask.shape)}")
        self._packed.append(pack(mask))
        self.used |= mask

    def remove(self, index: int) -> None:
        self.load([packed for position, packed in enumerate(self._packed) if position != index])

    def mask(self, index: int) -> Tensor:
        return unpack(self._packed[index], self.size)

    def masks(self, indices: Iterable[int]) -> Tensor:
        """Several, one in a row."""
        return unpack(torch.stack([self._packed[index] for index in indices]), self.size)

    def packed(self, index: int) -> Tensor:
        """The stored bytes of one mask."""
        return self._packed[index]

    def free(self, mask: Tensor) -> Tensor:
        """Of these weights, the ones no task uses yet: M ∧ ¬U."""
        return mask & ~self.used

    def overlap(self, mask: Tensor) -> float | None:
        """Sparse overlap |M ∧ U| / |M|; None for the first task, which has nothing to overlap with."""
        if not self._packed:
            return None
        return int((mask & self.used).count_nonzero()) / int(mask.count_nonzero())

    def owners(self) -> Tensor:
        """Per weight, the first task whose mask holds it (int32), −1 where it is free."""
        owner = torch.full((self.size,), -1, dtype=torch.int32, device=self.used.device)
        for index in reversed(range(len(self))):
            owner[self.mask(index)] = index
        return owner

    @property
    def free_count(self) -> int:
        """Weights that no task uses: what is left to train."""
        return self.size - int(self.used.count_nonzero())

    @property
    def bits(self) -> int:
        """Bits of mask kept for all tasks: one per weight and task."""
        return self.size * len(self)

    def to(self, device: torch.device | str) -> None:
        self.used = self.used.to(device)
        self._packed = [p.to(device) for p in self._packed]

    def load(self, packed: list[Tensor]) -> None:
        """Replace the content with stored masks."""
        device = self.used.device
        self.used = torch.zeros_like(self.used)
        self._packed = []
        for stored in packed:
            self._packed.append(stored.to(device))
            self.used |= self.mask(len(self) - 1)
