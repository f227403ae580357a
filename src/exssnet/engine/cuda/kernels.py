"""Triton kernels: whether they can run, `triton.jit` with a type, and their compilation ahead of the first launch.

A network has dozens of kernels. Each is compiled when it is first launched, one after the other. While something is
precompiled, launches only ask for the compilation. Threads compile all of them at the same time, during what comes
after; the first real launch of a kernel waits for it.

Kernels are compiled and loaded in several threads, which Triton's loading of launchers does not allow (`_isolated`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.runtime.build

jit: Callable[[Callable[..., Any]], Any] = triton.jit

_precompiling = ContextVar("precompiling", default=False)
_lock = threading.Lock()
_coming: dict[int, dict[Any, Future[None]]] = {}  # by kernel: its variants that are being compiled


def _isolated(load: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """A loader of C modules that gives every caller what it loaded, whatever other threads load.

    Triton 3.6 calls each kernel's launcher `__triton_launcher`. A file that Python loads for the second time goes into
    the module that has the name then: two threads get the same one, and one of them finds the other's `launch` in it.
    Triton 3.9 has one launcher for all kernels; it loads other modules this way, which the lock does not harm.
    """
    lock = threading.Lock()

    @wraps(load)
    def loaded(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    return loaded


_load = getattr(triton.runtime.build, "_load_module_from_path", None)
if _load is not None:
    triton.runtime.build._load_module_from_path = _isolated(_load)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; while something is precompiled, have it compiled only."""
    if _precompiling.get():
        _make(kernel, kernel.warmup(*arguments, grid=grid, **options))
        return
    if _coming:
        _wait_for(kernel)
    kernel[grid](*arguments, **options)


def precompiling() -> bool:
    """Whether launches of this thread are precompiled now."""
    return _precompiling.get()


def precompile(function: Callable[[], None]) -> None:
    """Call a function without its launches, which are compiled; does not wait for the kernels.

    What they would have written is whatever the memory held. The caller takes back what the function changed.
    """

    def precompiled() -> None:
        _precompiling.set(True)
        # never left: at its end it would wait. It is over with the context that it was entered in
        _mode(torch.cuda.current_device()).__enter__()
        with torch.autograd.set_multithreading_enabled(False):  # a backward pass stays in this thread
            function()

    copy_context().run(precompiled)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="exssnet-kernels")


@cache
def _mode(device: int) -> Any:
    """One for all precompilations on a device: it knows what it was asked for before."""
    return triton.AsyncCompileMode(_pool())


def _make(kernel: Any, variant: Any) -> None:
    """Have a variant of a kernel compiled, loaded, and given a launcher, which is C code."""
    if not hasattr(variant, "result"):
        return  # it is there already
    device = torch.cuda.current_device()

    def make() -> None:
        with torch.cuda.device(device):
            variant.result().run  # noqa: B018 -- makes the launcher

    with _lock:
        variants = _coming.setdefault(id(kernel), {})
        if variant not in variants:
            variants[variant] = _pool().submit(make)


def _wait_for(kernel: Any) -> None:
    try:
        for future in list(_coming.get(id(kernel), {}).values()):
            future.result()
    except BaseException:
        _mode.cache_clear()  # it would answer with the same failure for ever
        raise
    finally:
        with _lock:
            variants = _coming.get(id(kernel), {})
            if all(future.done() for future in variants.values()):
                _coming.pop(id(kernel), None)
