"""Files that are there whole or not at all, and the folder for those that can be made again."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes | bytearray) -> None:
    """Replace a file atomically: written beside it, flushed to disk, then renamed over it. Links are not followed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def cache_folder() -> Path:
    """`EXSSNET_CACHE`, or `exssnet` in the user's cache folder."""
    if chosen := os.environ.get("EXSSNET_CACHE"):
        return Path(chosen).expanduser()
    usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA") or "~/AppData/Local"}
    home = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    return Path(home).expanduser() / "exssnet"
