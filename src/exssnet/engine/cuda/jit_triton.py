"""`triton.jit` with a type, so that what it decorates can be checked; and launches that can be rehearsed.

Kernels are compiled and loaded in several threads, which Triton's loading of launchers does not stand (`_apart`).

A network has dozens of kernels. Each is compiled when it is first launched, one after the other. In a rehearsal
launches only ask for the compilation. Threads compile all of them side by side, beside what comes after the rehearsal;
the first real launch of a kernel waits for it.
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

_rehearsing = ContextVar("rehearsing", default=False)
_lock = threading.Lock()
_coming: dict[int, dict[Any, Future[None]]] = {}  # by kernel: its forms that are being made


def _apart(load: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """A loader of C modules that gives every caller what it loaded, whatever other threads load.

    Triton 3.6 calls each kernel's launcher `__triton_launcher`. A file that Python loads for the second time goes into
    the module that has the name then: two threads get the same one, and one of them finds the other's `launch` in it.
    Triton 3.9 has one launcher for all kernels; it loads other modules so, which the turn does no harm.
    """
    turn = threading.Lock()

    @wraps(load)
    def loaded(name: str, path: str) -> SimpleNamespace:
        with turn:
            return SimpleNamespace(**vars(load(name, path)))

    return loaded


_load = getattr(triton.runtime.build, "_load_module_from_path", None)
if _load is not None:
    triton.runtime.build._load_module_from_path = _apart(_load)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; in a rehearsal have it compiled only."""
    if _rehearsing.get():
        _make(kernel, kernel.warmup(*arguments, grid=grid, **options))
        return
    if _coming:
        _wait_for(kernel)
    kernel[grid](*arguments, **options)


def rehearsing() -> bool:
    """Whether launches of this thread are rehearsed now."""
    return _rehearsing.get()


def rehearse(function: Callable[[], None]) -> None:
    """Call a function, rehearsing what it launches; does not wait for the kernels."""

    def rehearsed() -> None:
        _rehearsing.set(True)
        # never left: at its end it would wait. It is over with the context that it was entered in
        _mode(torch.cuda.current_device()).__enter__()
        with torch.autograd.set_multithreading_enabled(False):  # a backward pass stays in this thread
            function()

    copy_context().run(rehearsed)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="exssnet-kernels")


@cache
def _mode(device: int) -> Any:
    """One for all rehearsals on a device: it knows what it was asked for before."""
    return triton.AsyncCompileMode(_pool())


def _make(kernel: Any, form: Any) -> None:
    """Have a form of a kernel made ready to be launched: compiled, loaded, and with a launcher, which is C code."""
    if not hasattr(form, "result"):
        return  # it is there already
    device = torch.cuda.current_device()

    def make() -> None:
        with torch.cuda.device(device):
            form.result().run  # noqa: B018 -- makes the launcher

    with _lock:
        forms = _coming.setdefault(id(kernel), {})
        if form not in forms:
            forms[form] = _pool().submit(make)


def _wait_for(kernel: Any) -> None:
    try:
        for future in list(_coming.get(id(kernel), {}).values()):
            future.result()
    except BaseException:
        _mode.cache_clear()  # it would answer with the same failure for ever
        raise
    finally:
        with _lock:
            forms = _coming.get(id(kernel), {})
            if all(future.done() for future in forms.values()):
                _coming.pop(id(kernel), None)
