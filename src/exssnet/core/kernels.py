"""Whether our kernels for a GPU can run: they are written in Triton, which comes with torch on most platforms."""

from __future__ import annotations

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


def can_rehearse(x: Tensor) -> bool:
    """Whether the kernels of a call with this input can be compiled beforehand, many at a time."""
    return x.is_cuda and _compiles_in_threads() and not torch.cuda.is_current_stream_capturing()


@cache
def _compiles_in_threads() -> bool:
    if not has_triton():
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")
