"""Methods that train parts of each task's own: nothing changes what is stored of a task, and that is proved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from exssnet.core.proof import Verification, combined_digest, digests_of
from exssnet.data.tasks import Task
from exssnet.methods.base import Phase, Tensors, bits
from exssnet.methods.text._base import TextMethod


class OwnParts(TextMethod):
    """Every task trains the same parts of the network from the same start, and keeps them."""

    heads = ("task",)
    exclusive = True

    def prepare(self) -> None:
        super().prepare()
        self.stored = Tensors()  # "task/name"
        self.digests: dict[str, str] = {}  # of each task, as it was learned
        # not part of the state: a method that is made the same way has the same
        self.start = {name: p.detach().clone() for name, p in self.trained().items()}

    def outputs(self) -> int:
        """Each task has a head of its own."""
        return max(map(len, self.groups))

    def columns(self, task: int) -> Tensor:
        return torch.arange(len(self.groups[task]), device=self._device())

    def phases(self, task: Task) -> Iterator[Phase]:
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(self.start[name])
        yield from super().phases(task)

    def end_task(self, task: Task) -> None:
        mine = {name: p.detach().clone() for name, p in self.trained().items()}
        count = len(self.own)
        mine |= {name: mine[name][:count].clone() for name in mine if name.startswith("head.")}
        self.stored.update({f"{task.name}/{name}": tensor for name, tensor in mine.items()})
        self.digests[task.name] = self.digest(task.name)
        super().end_task(task)
        self.verify()

    def logits(self, x: Tensor, task: str) -> Tensor:
        """With the task's own parts in the network, while it runs."""
        own = self.stored.below(f"{task}/")
        with torch.no_grad():
            out: Tensor = functional_call(self.network.eval(), own, (x,))
        return out

    # --- the proof -------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, Tensor]:
        """What all tasks compute with."""
        trained = self.trained().keys()
        return {name: p for name, p in self.network.named_parameters() if name not in trained}

    def digest(self, task: str) -> str:
        """Of all that a learned task computes with, as it is now."""
        return combined_digest(digests_of(self.shared() | self.stored.below(f"{task}/")))

    def verify(self) -> Verification:
        everybody = digests_of(self.shared())
        now = {t: combined_digest(everybody | digests_of(self.stored.below(f"{t}/"))) for t in self.digests}
        found = Verification(dict(self.digests), tuple((t, "own parts") for t in now if now[t] != self.digests[t]))
        found.require()
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors, facts | {"digests": dict(self.digests)}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self.digests = dict(facts["digests"])
        self.verify()

    def storage(self) -> dict[str, int]:
        return {"weight_bits": bits(self.stored.values())}  # the parts being trained are not among them
