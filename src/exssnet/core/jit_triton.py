"""`triton.jit` with a type, so that what it decorates can be checked; and launches that can be rehearsed.

A network has dozens of kernels. Each is compiled when it is first launched, one after the other. In a rehearsal
launches only ask for the compilation, and all of them are compiled at the same time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton

jit: Callable[[Callable[..., Any]], Any] = triton.jit


class _Mode(threading.local):
    rehearsing = False


_mode = _Mode()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; in a rehearsal have it compiled only."""
    if _mode.rehearsing:
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def rehearsal() -> Iterator[None]:
    """What this thread launches inside is compiled by the end, and does not run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        _mode.rehearsing = True
        try:
            yield
        finally:
            _mode.rehearsing = False
