"""Files that are atomic: there with all of their content or not there; the folder for those that can be made again."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

TEMPORARY = r"\.{}\.\d+(-[0-9a-f]+)?\.tmp"  # a pattern: what `write_whole` calls a file of some name until it is whole


def temporary(path: Path) -> Path:
    """A name beside a file, for what is going to be that file or has been it."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_whole(path: Path, content: bytes | bytearray) -> None:
    """Replace a file atomically: written beside it, flushed to disk, then renamed over it. Links are not followed."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes | bytearray]) -> None:
    """The same of files that belong together: all are written before the first is renamed, and the last one counts."""
    beside = {temporary(path): path for path in contents}
    ours = [*beside]
    try:
        for made, path in beside.items():
            write_new(made, contents[path])
        for made, path in beside.items():
            made.replace(path)
            ours.append(path)
    except BaseException:
        for file in ours:
            with suppress(OSError):
                file.unlink()
        raise


def write_new(path: Path, content: bytes | bytearray) -> None:
    """Write a file that must not be there yet, and flush it to disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag("O_NOFOLLOW") | flag("O_CLOEXEC") | flag("O_BINARY")
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    """Have a folder's list of names on the disk; Windows does that by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flag(name: str) -> int:
    """A flag of `os.open`, where the system has it."""
    found: int = getattr(os, name, 0)
    return found


def cache_folder() -> Path:
    """`EXSSNET_CACHE`, or `exssnet` in the user's cache folder."""
    if chosen := os.environ.get("EXSSNET_CACHE"):
        return Path(chosen).expanduser()
    usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA") or "~/AppData/Local"}
    home = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    return Path(home).expanduser() / "exssnet"
