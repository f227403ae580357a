"""The cache folder: files of tensors that can be recomputed, so a missing or damaged one is never an error.

A file is written under a temporary name and renamed, so a reader or a second writer sees it complete or not at all.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from exssnet.data.dataset import digest_of
from exssnet.errors import ParseError
from exssnet.io.parse import require_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

FORMAT = 1  # increase when the same source files give other tensors
STALE_SECONDS = 3600  # seconds; an older partial file was left by a killed process

Pair = tuple["Tensor", "Tensor"]


def fingerprint(files: Sequence[Path], *purpose: str) -> str:
    """Make a key that changes when a source file is replaced, without reading it."""
    parts = [str(FORMAT), *purpose]
    for file in files:
        status = file.stat()
        parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def cached(file: Path, make: Callable[[], Pair]) -> tuple[Tensor, Tensor, str]:
    """Load inputs, labels and their digest from the cache, or make them and cache them if possible."""
    found = _read(file)
    if found is not None:
        return found
    inputs, labels = make()
    digest = digest_of(inputs, labels)
    try:
        write_tensors(file, {"inputs": inputs, "labels": labels}, {"digest": digest})
    except OSError as error:
        warnings.warn(
            f"cannot cache decoded data in {file.parent} ({error.strerror}), so it is decoded every time: "
            "set EXSSNET_CACHE to a writable folder",
            stacklevel=2,
        )
    return inputs, labels, digest


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    _sweep(file)
    partial = file.with_name(f"{file.name}.{os.getpid()}.{time.monotonic_ns()}.partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, file)
    except SafetensorError as error:  # safetensors' error for a full or read-only disk
        raise OSError(None, str(error)) from error
    finally:
        partial.unlink(missing_ok=True)


def _read(file: Path) -> tuple[Tensor, Tensor, str] | None:
    from safetensors import SafetensorError, safe_open

    try:
        require_regular(file)
        with safe_open(file, framework="pt") as stored:
            inputs, labels = stored.get_tensor("inputs"), stored.get_tensor("labels")
            digest = (stored.metadata() or {}).get("digest")
    except (OSError, ParseError, SafetensorError):
        return None
    return (inputs, labels, digest) if digest == digest_of(inputs, labels) else None


def _sweep(file: Path) -> None:
    for partial in file.parent.glob(f"{file.name}.*.partial"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
