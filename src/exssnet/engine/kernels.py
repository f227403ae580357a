"""Whether our kernels for a GPU can run: they are written in Triton, which comes with torch on most platforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed, also for torch.compile on a GPU."""
    return find_spec("triton") is not None


def has_kernels(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether a kernel for numbers of these types takes the tensor."""
    return x.is_cuda and x.dtype in dtypes and has_triton()


def is_rehearsing() -> bool:
    """Whether launches are only asked to be compiled now."""
    if not _can_rehearse():
        return False
    from exssnet.engine.cuda.jit_triton import rehearsing

    return rehearsing()


def rehearse(device: torch.device, function: Callable[[], None]) -> None:
    """Call a function without launching our kernels: those that it would launch are compiled, many at a time.

    What they would have written is whatever the memory held. The caller takes back what the function changed.
    """
    if device.type == "cuda" and _can_rehearse() and not torch.cuda.is_current_stream_capturing():
        from exssnet.engine.cuda.jit_triton import rehearse

        with torch.random.fork_rng(devices=[device]):
            rehearse(function)


@cache
def _can_rehearse() -> bool:
    if not has_triton():
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")
