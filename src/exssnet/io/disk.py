"""Atomic writes, and the cache folder."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

TEMPORARY = r"\.{}\.\d+(-[0-9a-f]+)?\.tmp"  # pattern of the temporary names of `write_atomic`


def temporary(path: Path) -> Path:
    """A temporary name in the folder of a file, for its next or previous version."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_atomic(path: Path, content: bytes | bytearray) -> None:
    """Replace a file atomically: write a temporary file, flush it to disk, rename it. Links are not followed."""
    write_all_atomic({path: content})


def write_all_atomic(contents: Mapping[Path, bytes | bytearray]) -> None:
    """Replace several files: all are written before the first is renamed; the last rename commits."""
    written = {temporary(path): path for path in contents}
    ours = [*written]
    try:
        for made, path in written.items():
            write_new(made, contents[path])
        for made, path in written.items():
            made.replace(path)
            ours.append(path)
    except BaseException:
        for file in ours:
            with suppress(OSError):
                file.unlink()
        raise


def write_new(path: Path, content: bytes | bytearray) -> None:
    """Write a file that must not exist, and flush it to disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag("O_NOFOLLOW") | flag("O_CLOEXEC") | flag("O_BINARY")
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    """Flush a folder's list of names to disk; Windows does that itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flag(name: str) -> int:
    """A flag of `os.open`; 0 if the system does not have it."""
    found: int = getattr(os, name, 0)
    return found


def cache_folder() -> Path:
    """`EXSSNET_CACHE`, or `exssnet` in the user's cache folder."""
    if chosen := os.environ.get("EXSSNET_CACHE"):
        return Path(chosen).expanduser()
    usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA") or "~/AppData/Local"}
    home = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    return Path(home).expanduser() / "exssnet"
