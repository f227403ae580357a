"""Digests: the evidence that a task is still what it was when it was learned, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exssnet.errors import ForgettingError

STORED_CHECKS = 32  # earlier tasks whose stored bits and private tensors are checked again after each task


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 over a tensor's type, shape and raw bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def combined_digest(digests: Mapping[str, str]) -> str:
    """One SHA-256 for a set of named tensor digests, whatever their order."""
    text = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Verification:
    """What a check of all tasks found: each task's digest as learned, and every tensor that differs now."""

    digests: dict[str, str]
    changed: tuple[tuple[str, str], ...]  # (task, tensor)

    @property
    def verified(self) -> bool:
        return not self.changed

    def require(self) -> None:
        """Raise if anything changed, naming the task and the tensor."""
        if self.changed:
            task, tensor = self.changed[0]
            more = f" (and {len(self.changed) - 1} more tensors)" if len(self.changed) > 1 else ""
            raise ForgettingError(
                f"task '{task}' changed after it was learned: tensor '{tensor}'{more} no longer has its digest"
            )


class Turns:
    """Whose stored parts are checked after a task is learned: those first that have waited longest."""

    def __init__(self) -> None:
        self._waiting: list[str] = []

    def take(self, tasks: Mapping[str, object]) -> list[str]:
        """Of these tasks those to check now: some in turn, and all that were never checked, as after a load."""
        known = [task for task in self._waiting if task in tasks]
        taken = known[:STORED_CHECKS] + [task for task in tasks if task not in set(known)]
        self._waiting = known[STORED_CHECKS:] + taken
        return taken


def differing(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The names of what has another digest."""
    return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
