"""A directory that changes from one whole state to the next, or not at all.

    manifest.json    replaced atomically, last: the only moment at which a change happens
    files/           named after their content, written once, never changed
    lock             held by the one process that writes
    unfinished       while the first manifest is to come

A change writes its new files, then the manifest that names them. The manifest before is kept as a file too, with all
that it names, so the last change can be taken back; a note then says so. What none of these names is swept away by the
next change.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from exssnet.disk import write_whole
from exssnet.errors import StoreError
from exssnet.store.manifest import File, Manifest, parse, undone_note

MANIFEST, FILES, LOCK, UNFINISHED = "manifest.json", "files", "lock", "unfinished"
_OURS = re.compile(r"[0-9a-f]{32}\.(json|safetensors)|\.[0-9a-f]{32}\.(json|safetensors)\.\d+\.tmp")


class Folder:
    """The files of a model directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return os.path.isfile(self.path / MANIFEST)

    def manifest(self) -> Manifest:
        return parse(self.manifest_bytes(), str(self.path / MANIFEST))

    def manifest_bytes(self) -> bytes:
        try:
            return (self.path / MANIFEST).read_bytes()
        except FileNotFoundError as error:
            raise Missing(f"{self.path} is no model directory: it has no {MANIFEST}") from error
        except OSError as error:
            raise StoreError(f"{self.path / MANIFEST} cannot be read: {error.strerror}") from error

    def read(self, file: File) -> bytes:
        """A file's content, if it is what the manifest says."""
        path = self.path / FILES / file.name
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise Missing(f"{path} is missing") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        if File.of(content, file.name.partition(".")[2]) != file:
            raise StoreError(f"{path} is damaged: it does not have the digest in the manifest")
        return content

    def has_tasks(self) -> bool:
        """Whether there are files that only a manifest with tasks leaves, be the manifest there or not."""
        return any((self.path / FILES).glob("[0-9a-f]" * 32 + ".json"))

    def note(self, content: bytes) -> File | None:
        """The note that a change was undone, back to the manifest with this content; None if none was."""
        note = File.of(undone_note(content), "json")
        return note if os.path.isfile(self.path / FILES / note.name) else None

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Be the one writer; what fails inside changes nothing, and leaves no directory that was not there."""
        made = self._make()
        with self._locked() as lock:
            with suppress(OSError):  # only for others to read, and no reason to stop
                lock.truncate(0)
                lock.write(f"process {os.getpid()}\n".encode())
            try:
                if not self.exists():
                    self._begin()
                yield Writer(self)
            except OSError as error:
                if error.filename is not None and self.path not in Path(os.fsdecode(error.filename)).parents:
                    raise  # of a file that is not ours
                raise StoreError(f"{self.path} cannot be written, and is as it was: {_reason(error)}") from error
            finally:
                if made and not self.exists():
                    self._unmake(made)

    def _make(self) -> list[Path]:
        """Make the directory; those that were not there, the outermost first."""
        files = self.path / FILES
        try:
            made = [place for place in (self.path, *self.path.parents) if not os.path.lexists(place)][::-1]
            files.mkdir(parents=True, exist_ok=True)
            for place in made:
                _sync(place.parent)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        if files.is_symlink():  # what is swept there might be another model's
            raise StoreError(f"{files} is a link: a model directory has its files in a folder of its own")
        return made

    def _begin(self) -> None:
        """Mark a directory whose first manifest is to come, so that files without one are known to be left over."""
        if self.has_tasks() and not os.path.lexists(self.path / UNFINISHED):
            raise StoreError(
                f"{self.path} holds tasks, but has lost its {MANIFEST}: put that back, or use another directory"
            )
        write_whole(self.path / UNFINISHED, b"")

    def _unmake(self, made: list[Path]) -> None:
        with suppress(OSError):
            for path in [*(self.path / FILES).iterdir()]:
                if _OURS.fullmatch(path.name):
                    path.unlink()
            (self.path / FILES).rmdir()
            (self.path / UNFINISHED).unlink(missing_ok=True)
            (self.path / LOCK).unlink()
            for place in reversed(made):
                place.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        path, flags = self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            try:
                lock = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
            except OSError as error:
                raise StoreError(f"{self.path} cannot be written: {path.name}: {error.strerror}") from error
            with lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    who = lock.read(40).decode(errors="replace").strip() or "another process"
                    raise StoreError(f"{self.path} is being changed by {who}: try again when it is done") from error
                except OSError as error:
                    raise StoreError(f"{self.path} cannot be locked: {error.strerror}") from error
                try:
                    there = os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
                except OSError:
                    there = False
                if there:  # and not that of a directory which its maker has just taken away
                    yield lock
                    return
            self._make()


class Missing(StoreError):
    """A file that a manifest names is not there; perhaps the directory has changed meanwhile."""


class Writer:
    """Puts files, then commits them with a manifest. Only while the lock is held."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._files = folder.path / FILES

    def put(self, content: bytes, ending: str) -> File:
        """Write a file for good, unless it is there already, undamaged."""
        file = File.of(content, ending)
        path = self._files / file.name
        if not (path.is_file() and path.read_bytes() == content):
            write_whole(path, content)
        return file

    def commit(self, manifest: Manifest) -> Manifest:
        """Make this the state of the directory; the manifest as written."""
        before = None
        number = 0
        if self.folder.exists():
            now = self.folder.manifest_bytes()
            before, number = self.put(now, "json"), parse(now, MANIFEST).number + 1
        time = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = replace(manifest, before=before, number=number, time=time)
        self._replace(manifest.content())
        return manifest

    def rollback(self) -> Manifest:
        """Put the manifest before the last change back; what it says now."""
        now = self.folder.manifest()
        if now.before is None:
            raise StoreError(f"{self.folder.path} has no change that could be undone")
        if self.folder.note(self.folder.manifest_bytes()) is not None:
            raise StoreError(f"{self.folder.path}: only the last change can be undone, and it has been")
        content = self.folder.read(now.before)
        back = parse(content, now.before.name)
        for file in back.files():
            self.folder.read(file)
        if back.before is not None:
            self.put(undone_note(content), "json")
        self._replace(content)
        return back

    def _replace(self, content: bytes) -> None:
        _sync(self._files)
        write_whole(self.folder.path / MANIFEST, content)
        try:
            _sync(self.folder.path)
        except OSError as error:
            raise StoreError(
                f"{self.folder.path} was changed, but a power failure may still undo it: {_reason(error)}"
            ) from error
        with suppress(OSError):  # what stays behind is swept the next time
            self._sweep()

    def _sweep(self) -> None:
        """Remove what neither the manifest nor the one before it names; files that others put there stay."""
        content = self.folder.manifest_bytes()
        now = parse(content, MANIFEST)
        kept = {file.name for file in now.files()} | {File.of(undone_note(content), "json").name}
        if now.before is not None:
            kept.add(now.before.name)
            with suppress(StoreError):
                kept |= {file.name for file in parse(self.folder.read(now.before), "").files()}
        (self.folder.path / UNFINISHED).unlink(missing_ok=True)
        unfinished = self.folder.path.glob(".*.tmp")  # of a writer that was killed
        swept = [path for path in self._files.iterdir() if _OURS.fullmatch(path.name) and path.name not in kept]
        for path in [*swept, *unfinished]:
            with suppress(OSError):  # such as a folder in its place: the others go
                path.unlink()


def _sync(folder: Path) -> None:
    """Have the folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{error.strerror}; make room and try again" if full else str(error.strerror or error)
