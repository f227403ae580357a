"""How functions are compiled by numba, and kept for other processes.

numba's own cache lies in the package's folder, which may be read-only, and trusts its files: a damaged one ends the
process. Here a file lies in the user's cache folder and is read only if its digest is right, and whatever goes wrong
with it, the function is compiled.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import platform
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import serialize
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult

from exssnet.io.disk import cache_folder, write_atomic
from exssnet.io.parse import MEBIBYTE, read

DIGEST = 32  # bytes in front of what a file holds
MOST_BYTES = 64 * MEBIBYTE

_rebuild: Callable[..., Any] = CompileResult._rebuild
_dumps: Callable[[Any], bytes] = serialize.dumps


def jit(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called."""
    compiled: Any = numba.njit(error_model="numpy")(function)
    compiled._cache = _Kept(function)
    return compiled


class _Kept(NullCache):
    """What a function was compiled to, in a file for each kind of arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled before; None if it is not there, or not as it was written."""
        target_context.refresh()
        try:
            content = read(self._file(sig, target_context.codegen()), MOST_BYTES)
            digest, held = content[:DIGEST], content[DIGEST:]
            if hashlib.sha256(held).digest() == digest:
                return _rebuild(target_context, *pickle.loads(held))
        except Exception:  # of numba's inside, too: another version's, say
            return None
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.lifted or data.library.has_dynamic_globals:
            return
        try:
            held = _dumps(data._reduce())
            file = self._file(sig, data.codegen)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, hashlib.sha256(held).digest() + held)
        except OSError as error:
            _warn_once(str(error.strerror))
        except Exception:  # then it is compiled in every process
            return

    def _file(self, sig: Any, codegen: Any) -> Path:
        """Its name says all that the code follows from: source, arguments, versions and processor."""
        function = self._function
        source = Path(inspect.getfile(function)).read_bytes()
        where = (function.__qualname__, function.__code__.co_firstlineno, hashlib.sha256(source).hexdigest())
        versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, platform.python_version())
        key = hashlib.sha256(repr((where, str(sig), codegen.magic_tuple(), versions)).encode()).hexdigest()
        return cache_folder() / "numba" / f"{function.__name__}-{key[:32]}"


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"cannot keep compiled kernels in {cache_folder()} ({reason}), so every process compiles them: "
        "set EXSSNET_CACHE to a writable folder",
        stacklevel=2,
    )
