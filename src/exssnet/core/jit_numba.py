"""How functions are compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called, and kept for other processes."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder where what was compiled could be kept
        return numba.njit(error_model="numpy")(function)
