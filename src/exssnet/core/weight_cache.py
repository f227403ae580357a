"""A cache of tasks' masked weights: made when a task is run, and held for those that were run last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exssnet.core.engine import Weights


class WeightCache:
    """Masked weights by task. As soon as the shared weights change, what was made of them is not used again."""

    def __init__(self) -> None:
        self.bytes = 0  # room besides the weights of the task that was run last
        self._held: OrderedDict[Any, Weights] = OrderedDict()  # by what is known of a task, which no other one equals
        self._source: tuple[Tensor, int] | None = None  # the shared weights and their version

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be made again."""
        return {"bytes": self.bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.bytes = state["bytes"]

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self._source = None

    def get(self, task: object, source: Tensor, make: Callable[[], Weights]) -> Weights:
        """A task's weights, made of these shared weights."""
        if self._source is None or self._source[0] is not source or self._source[1] != source._version:
            self._held.clear()
            self._source = source, source._version
        key = id(task), task
        if key not in self._held:
            with torch.inference_mode(False):  # they will be of use outside of that as well
                made = make()
            each = sum(weight.numel() * weight.element_size() for weight in made.values())
            while self._held and len(self._held) + 1 > self.bytes // max(1, each):
                self._held.popitem(last=False)
            self._held[key] = made
        self._held.move_to_end(key)
        return self._held[key]
