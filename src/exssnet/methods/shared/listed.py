"""What the methods that list their learned tasks by name have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from exssnet.methods.base import Method


class Listed(Method):
    """A method whose state is its tensors and the names of the learned tasks; it reports its storage."""

    tasks: list[str]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return super().state()[0], {"tasks": list(self.tasks)}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self.tasks = list(facts["tasks"])

    def report(self) -> dict[str, Any]:
        return {"storage": self.storage()}

    @abstractmethod
    def storage(self) -> dict[str, int]:
        """Bits to keep, by kind."""
