"""The files of a model directory: reading them, and the lock that lets one process change them.

    manifest.json    replaced atomically, last
    files/           named after their content, written once, never changed
    lock             held by the one process that writes
    unfinished       until the first manifest is written

`exssnet.store.writer` writes changes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exssnet.errors import ParseError, StoreError
from exssnet.io.disk import TEMPORARY, flag, sync_names
from exssnet.io.parse import MEBIBYTE, read
from exssnet.store.format.manifest import File, Manifest, parse, undone_note

MANIFEST, FILES, LOCK, UNFINISHED = "manifest.json", "files", "lock", "unfinished"
MOST_MANIFEST = 64 * MEBIBYTE
WAIT = 0.2  # seconds to wait for another writer
FULL = {getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG")}
_NAME = r"[0-9a-f]{32}\.(json|safetensors)"
_TEMPORARY = TEMPORARY.format(rf"({_NAME}|[0-9a-f]{{32}}\.next|manifest\.json)")
OURS = re.compile(f"{_NAME}|{_TEMPORARY}")


class Folder:
    """The files of a model directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return os.path.isfile(self.path / MANIFEST)

    def manifest(self) -> Manifest:
        return parse(self.manifest_bytes(), str(self.path / MANIFEST))

    def manifest_bytes(self) -> bytes:
        """The manifest of the last change, even if the process was killed after its commit."""
        content = self.shown()
        with suppress(Missing):
            content = self._content(self.after(content), MOST_MANIFEST)
        return content

    def shown(self) -> bytes:
        """The content of `manifest.json`."""
        try:
            return self._content(self.path / MANIFEST, MOST_MANIFEST)
        except Missing as error:
            raise Missing(f"{self.path} is not a model directory: it has no {MANIFEST}") from error

    def after(self, manifest: bytes) -> Path:
        """The link that commits the manifest after this one, until it is renamed."""
        return self.path / FILES / f"{File.of(manifest, '').sha256[:32]}.next"

    def read(self, file: File) -> bytes:
        """Read a file and check its digest."""
        path = self.path / FILES / file.name
        content = self._content(path, file.size)
        if File.of(content, file.name.partition(".")[2]) != file:
            raise StoreError(f"{path} is damaged: its digest is not the one in the manifest")
        return content

    def _content(self, path: Path, most: int) -> bytes:
        try:
            return read(path, most, inside=self.path)
        except FileNotFoundError as error:
            raise Missing(f"{path} is missing") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        except ParseError as error:
            raise StoreError(f"{path} is damaged: {error}") from error

    def has_tasks(self) -> bool:
        """Whether there are files that only a manifest with tasks leaves, with or without the manifest."""
        return any((self.path / FILES).glob("[0-9a-f]" * 32 + ".json"))

    def note(self, content: bytes) -> File | None:
        """The note that the state before this manifest was deleted; None if it was not."""
        note = File.of(undone_note(content), "json")
        return note if os.path.isfile(self.path / FILES / note.name) else None

    # --- one writer ------------------------------------------------------------------------------------------

    def make(self) -> list[Path]:
        """Create the directory; return the created ones, outermost first."""
        files = self.path / FILES
        try:
            made = [place for place in (self.path, *self.path.parents) if not os.path.lexists(place)][::-1]
            files.mkdir(parents=True, exist_ok=True)
            for place in made:
                sync_names(place.parent)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        if files.is_symlink():  # cleaning up could remove files of another model
            raise StoreError(f"{files} is a link: replace it by a folder")
        return made

    def begin(self) -> None:
        """Mark a directory without a manifest, so that files without one are known to be left over."""
        mark = self.path / UNFINISHED
        if os.path.lexists(mark):
            return
        if self.has_tasks():
            raise StoreError(f"{self.path} has tasks but no {MANIFEST}: restore it, or use another directory")
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | flag("O_NOFOLLOW") | flag("O_CLOEXEC"), 0o666))
        sync_names(self.path)

    def unmake(self, made: list[Path]) -> None:
        """Remove a directory that `make` made and that got no manifest."""
        with suppress(OSError):
            for path in [*(self.path / FILES).iterdir()]:
                if OURS.fullmatch(path.name):
                    path.unlink()
            (self.path / FILES).rmdir()
            (self.path / UNFINISHED).unlink(missing_ok=True)
            (self.path / LOCK).unlink()
            for place in reversed(made):
                place.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. If it does not exclude others, a change is refused at its commit."""
        from filelock import FileLock, Timeout

        path = self.path / LOCK
        lock = FileLock(path, timeout=WAIT, poll_interval=WAIT / 10, thread_local=False)
        try:
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                raise StoreError(f"{path} is not a regular file: remove it")
            lock.acquire()
        except Timeout as error:
            raise StoreError(f"{self.path} is in use by {self._writer()}: try again when it ends") from error
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {LOCK}: {error.strerror}") from error
        try:
            self.sign()
            yield
        finally:
            with suppress(OSError):  # the change is complete
                lock.release()

    def sign(self) -> None:
        """Write the process id into the lock: for messages, and as a block that can be freed on a full disk."""
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_TRUNC | flag("O_NOFOLLOW") | flag("O_CLOEXEC")
            with os.fdopen(os.open(self.path / LOCK, flags), "wb", buffering=0) as file:
                file.write(f"process {os.getpid()}\n".encode())

    def _writer(self) -> str:
        """The process that holds the lock."""
        with suppress(OSError, ParseError):
            return read(self.path / LOCK, 40).decode(errors="replace").strip() or "another process"
        return "another process"


class Missing(StoreError):
    """A file that a manifest names is missing; the directory may have changed meanwhile."""


def reason(error: OSError) -> str:
    """The reason of a write error."""
    full = error.errno in FULL
    return f"{error.strerror}; free disk space and try again" if full else str(error.strerror or error)


def holds(path: Path, content: bytes) -> bool:
    """Whether a file with this content exists."""
    try:
        return read(path, len(content)) == content
    except (OSError, ParseError):
        return False
