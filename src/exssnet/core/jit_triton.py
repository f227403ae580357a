"""`triton.jit` with a type, so that what it decorates can be checked."""

from collections.abc import Callable
from typing import Any

import triton

jit: Callable[[Callable[..., Any]], Any] = triton.jit
