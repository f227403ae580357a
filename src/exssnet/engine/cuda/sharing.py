"""The GPU lock: runs that share a GPU use it from Python one at a time; what is captured needs no lock.

Seeding, capturing, compiling and single operations of several threads would disturb each other: a graph must not be
captured while another thread reseeds a generator or lets a library set itself up. So a thread does all of that while it
holds the lock, and releases it while its graphs are replayed. A thread that never asked for the lock, as in a run
alone, does not wait for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_lock = threading.Lock()
_mine = threading.local()


def ask_for_connections() -> None:
    """Before CUDA starts: have as many connections to a GPU as there can be, unless the user says how many.

    Streams share them, and by default there are eight: what one run launches then waits for what another has launched.
    """
    os.environ.setdefault(CONNECTIONS, "32")


@contextmanager
def holding_gpu() -> Iterator[None]:
    """Hold the lock, except in what is done under `releasing_gpu`."""
    with _lock:
        _mine.held = True
        try:
            yield
        finally:
            _mine.held = False


@contextmanager
def releasing_gpu() -> Iterator[None]:
    """Let others work while the GPU is busy with what this thread has launched."""
    if not getattr(_mine, "held", False):
        yield
        return
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()


class GpuThreads(ThreadPoolExecutor):
    """Threads that share a GPU: each launches on a CUDA stream of its own, and holds the lock while Python works."""

    def __init__(self, device: str, count: int) -> None:
        super().__init__(count, initializer=self._begin)
        self._device, self._own = device, threading.local()

    def submit(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **options: Arguments.kwargs
    ) -> Future[Result]:
        """Call a function in one of the threads."""
        return super().submit(self._on_stream, function, *args, **options)

    def _begin(self) -> None:
        import torch

        # one per thread: there are not enough for one per run
        self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _on_stream(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        import torch

        with holding_gpu(), torch.cuda.stream(self._own.stream):
            return function(*args, **options)
