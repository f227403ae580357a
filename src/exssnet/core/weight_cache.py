"""What learned tasks run with: made when it is asked for, and kept for those asked for last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Weights = dict[str, Tensor]  # by layer, as a module runs with them
Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


def locked(method: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Of a network: no other thread sees half of what the method changes, or changes what it reads."""

    @wraps(method)
    def held(*args: Arguments.args, **options: Arguments.kwargs) -> Found:
        ready: Ready = args[0].ready  # type: ignore[attr-defined]
        with ready.lock:
            return method(*args, **options)

    return held


class Ready:
    """A cache of tasks' weights. Several threads may ask."""

    def __init__(self, make: Callable[[Sequence[str]], list[Weights]]) -> None:
        self._make = make
        self.bytes = 0  # room beside the weights of the task asked for last
        self._kept: OrderedDict[str, Weights] = OrderedDict()
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be made again, and without the lock."""
        return {"_make": self._make, "bytes": self.bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept, self.lock = OrderedDict(), threading.RLock()

    def __call__(self, task: str) -> Weights:
        with self.lock:
            if task not in self._kept:
                self._add([task])
            self._kept.move_to_end(task)
            return self._kept[task]

    @contextmanager
    def several(self, tasks: Sequence[str]) -> Iterator[None]:
        """Have the weights of several tasks made at once, and kept meanwhile whether there is room for them or not."""
        with self.lock:
            self._add(tasks)
        try:
            yield
        finally:
            self.let_go(tasks)

    def let_go(self, tasks: Iterable[str] | None = None) -> None:
        """Forget these tasks' weights, or all of them where something changes."""
        with self.lock:
            for task in list(self._kept) if tasks is None else tasks:
                self._kept.pop(task, None)

    @torch.inference_mode(False)  # they will be of use outside of that as well
    def _add(self, tasks: Sequence[str]) -> None:
        made = self._make(tasks)
        each = sum(weight.numel() * weight.element_size() for weight in made[0].values())
        while self._kept and len(self._kept) + len(tasks) > self.bytes // max(1, each):
            self._kept.popitem(last=False)
        self._kept.update(zip(tasks, made, strict=True))
