"""The evidence that a task is what it was when it was learned, bit for bit: digests, and when they are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exssnet.core.selection import keep_only
from exssnet.errors import ForgettingError

if TYPE_CHECKING:
    from exssnet.core.network import LearnedTask, MaskedNetwork

ALL_TASKS = "(shared by all tasks)"
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


def differing(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The names of what has another digest."""
    return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))


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


class Proof:
    """Takes the digests of a network's tasks, and checks them.

    Earlier tasks' masks lie inside the used set, so after a new task one digest of the used weights covers them all,
    however many there are. What is stored for a task alone, its bits and private tensors, no training touches: those
    of some tasks are checked each time, by rotation, and all by `verify`.
    """

    def __init__(self, network: MaskedNetwork) -> None:
        self._network = network
        self._queue: list[str] = []  # tasks whose stored parts have been checked, the one that waits longest first
        self._used = ""  # digest of the used weights
        self.seal()

    def seal(self) -> None:
        """From now on what all tasks share has to stay as it is."""
        self._shared = self._digests_of_shared()

    def take(self, learned: LearnedTask) -> None:
        """Take a new task's digests; it is the last in the network."""
        learned.digests = self._digests_of(learned)
        learned.kept = self.stored_digest(learned)
        self.accept()

    def accept(self) -> None:
        """From now on the used weights have to stay as they are."""
        self._used = self._digest_of_used()

    def restart(self) -> None:
        """Check the stored parts of all tasks next time, as after a load."""
        self._queue = []
        self.accept()

    def check_earlier(self) -> None:
        """Raise if an earlier task changed; called with a new task's weights in place and not yet its mask."""
        net = self._network
        if not net.tasks:
            return
        stored = all(self.stored_digest(net.tasks[name]) == net.tasks[name].kept for name in self._next())
        if not (stored and self._digest_of_used() == self._used and self._digests_of_shared() == self._shared):
            self.verify().require()
            raise ForgettingError("weights used by earlier tasks changed, though no task's digest differs")

    def verify(self) -> Verification:
        """Recompute every task's digests, and those of what all tasks share, from the tensors as they are now."""
        net = self._network
        changed = [(ALL_TASKS, name) for name in differing(self._digests_of_shared(), self._shared)]
        found = {}
        for name, learned in list(net.tasks.items()):
            with net.lock:  # for one task at a time: other threads predict meanwhile
                if net.tasks.get(name) is learned:
                    found[name] = learned.digest
                    changed += [(name, tensor) for tensor in differing(self._digests_of(learned), learned.digests)]
        return Verification(found, tuple(changed))

    def stored_digest(self, learned: LearnedTask) -> str:
        """Of what is stored for a task alone: its mask, private tensors and overridden weights."""
        own = [learned.private[name] for name in sorted(learned.private)]  # a checkpoint has them in another order
        stored = [self._network.bank.packed(self._network.position(learned.name)), *own, *(learned.override or ())]
        return tensor_digest(torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in stored]))

    def _next(self) -> list[str]:
        """The tasks to check now: those that wait longest, and all that were never checked."""
        tasks = self._network.tasks
        known = {task: None for task in self._queue if task in tasks}
        new = [task for task in tasks if task not in known]
        queue = list(known)
        taken = queue[:STORED_CHECKS] + new
        self._queue = queue[STORED_CHECKS:] + taken
        return taken

    def _digest_of_used(self) -> str:
        net = self._network
        return combined_digest(digests_of(net.layout.tensors(keep_only(net.weights, net.bank.used))))

    def _digests_of(self, learned: LearnedTask) -> dict[str, str]:
        return digests_of(self._network.effective(learned.name) | learned.private)

    def _digests_of_shared(self) -> dict[str, str]:
        return digests_of(self._network.frozen | self._network.buffers)
