"""Write a change of a model directory: files first, then the manifest that names them.

The previous manifest stays as a file with everything it names, so the last change can be undone; a note says if it was
deleted. The next change removes files that neither manifest names.

A change is committed by a hard link, named after the manifest that the change began from. If two processes write
without a working lock, one makes that link and the other is refused. The link is then renamed to `manifest.json`; a
reader that finds the link reads it as the manifest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from exssnet.errors import StoreError
from exssnet.io.disk import sync_names, temporary, write_atomic, write_new
from exssnet.store.directory import FILES, FULL, LOCK, MANIFEST, OURS, UNFINISHED, Folder, Missing, holds, reason
from exssnet.store.format.manifest import File, Manifest, parse, undone_note

NO_LINKS = {getattr(errno, name, None) for name in ("EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EXDEV")}

Done = TypeVar("Done")


@contextmanager
def writing(folder: Folder) -> Iterator[Writer]:
    """Lock the directory for a change; a failed change leaves everything as it was."""
    made = folder.make()
    with folder.locked():
        writer = None
        try:
            if not folder.exists():
                folder.begin()
            writer = Writer(folder)
            yield writer
        except (OSError, Missing) as error:
            if writer is not None:
                writer.require_not_overtaken(error)
            if isinstance(error, Missing):
                raise
            if error.filename is not None and folder.path not in Path(os.fsdecode(error.filename)).parents:
                raise  # from another file
            if writer is not None:
                raise writer.refusal(error) from error
            raise StoreError(f"{folder.path} cannot be written and is unchanged: {reason(error)}") from error
        finally:
            if made and not folder.exists():
                folder.unmake(made)


class Writer:
    """Writes files, then commits them with a manifest, while the lock is held."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._files = folder.path / FILES
        self._put: dict[File, bytes] = {}
        self._spends_way_back = False  # whether it may be deleted on a full disk
        self._way_back = True
        self._began = self._latest() if folder.exists() else None

    @property
    def manifest(self) -> Manifest | None:
        """The state that the change begins from."""
        return None if self._began is None else parse(self._began, str(self.folder.path / MANIFEST))

    def _latest(self) -> bytes:
        """The manifest that a change begins from; renamed first if the process that committed it was killed."""
        content = self.folder.shown()
        following = self.folder.after(content)
        if os.path.lexists(following):
            content = self.folder.manifest_bytes()
            parse(content, following.name)
            with suppress(FileNotFoundError):  # it was not killed
                following.replace(self.folder.path / MANIFEST)
            sync_names(self.folder.path)
        return content

    # --- files -----------------------------------------------------------------------------------------------

    def put(self, content: bytes, ending: str) -> File:
        """Write a file, unless it exists undamaged."""
        return self._with_room(lambda: self._write(content, ending))

    def _write(self, content: bytes, ending: str) -> File:
        file = File.of(content, ending)
        if not holds(self._files / file.name, content):
            write_atomic(self._files / file.name, content)
        self._put[file] = content
        return file

    # --- committing ------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest) -> Manifest:
        """Commit this state; return the manifest as written."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        now = self.manifest
        number = 0 if now is None else now.number + 1
        manifest = replace(manifest, number=number, time=time)
        return self._with_room(lambda: self._commit(manifest))

    def _commit(self, manifest: Manifest) -> Manifest:
        before = None
        if self._began is not None and self._way_back:
            before = self._write(self._began, "json")
        manifest = replace(manifest, before=before)
        content = manifest.content()
        fresh = temporary(self._files / MANIFEST)
        try:
            write_new(fresh, content)
            self._replace(fresh, content)
        finally:
            with suppress(OSError):
                fresh.unlink()
        self._sweep_up()
        return manifest

    def rollback(self) -> Manifest:
        """Restore the previous manifest and return it. Needs no disk space."""
        now = self.manifest
        if self._began is None or now is None or now.before is None:
            raise StoreError(f"{self.folder.path} has no change to undo")
        if self.folder.note(self._began) is not None:
            raise StoreError(
                f"{self.folder.path} has no change to undo: the previous state was restored already, or deleted on a "
                f"full disk"
            )
        content = self.folder.read(now.before)
        back = parse(content, now.before.name)
        for file in back.files():
            self.folder.read(file)
        noted = back.before is None or self._note(content)
        self.folder.after(content).unlink(missing_ok=True)  # its former successor
        self._replace(self._files / now.before.name, content)
        self._sweep_up()
        if not noted:  # now there is space
            with suppress(OSError):
                self._note(content)
        return back

    def _note(self, content: bytes) -> bool:
        """Note that the previous manifest was deleted, if there is space."""
        try:
            self._write(undone_note(content), "json")
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        return True

    def _replace(self, fresh: Path, content: bytes) -> None:
        """Commit a written file, the manifest with this content, as successor of the one it began from."""
        shown = self.folder.path / MANIFEST
        sync_names(self._files)
        if self._began is None:
            self._link(fresh, shown)
            self._settle(shown)
            return
        following = self.folder.after(self._began)
        self._link(fresh, following)
        if self._is_too_late(following, content):
            following.unlink(missing_ok=True)
            raise self._too_late()
        self._settle(following)

    def _settle(self, committed: Path) -> None:
        """Finish a committed change."""
        shown = self.folder.path / MANIFEST
        try:
            sync_names(self._files)
            if committed != shown and self.folder.shown() == self._began:
                with suppress(FileNotFoundError):  # another process has done so
                    committed.replace(shown)
            sync_names(self.folder.path)
            for file, content in self._put.items():
                if not os.path.lexists(self._files / file.name):  # removed by a process that the lock did not exclude
                    write_atomic(self._files / file.name, content)
        except OSError as error:
            raise StoreError(
                f"{self.folder.path} was changed, but a power failure may still undo it: {reason(error)}"
            ) from error

    def _link(self, fresh: Path, to: Path) -> None:
        """Link a file; of several processes one succeeds."""
        try:
            os.link(fresh, to)
        except FileExistsError as error:
            raise self._too_late() from error
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._require_unchanged()  # the best check on a file system without hard links
            write_atomic(to, fresh.read_bytes())

    def _require_unchanged(self) -> None:
        now = self.folder.manifest_bytes() if self.folder.exists() else None
        if now != self._began:
            raise self._too_late()

    def require_not_overtaken(self, error: Exception) -> None:
        """Raise an error if another process changed the directory, which explains missing files."""
        try:
            self._require_unchanged()
        except StoreError as overtaken:
            raise overtaken from error

    def _is_too_late(self, following: Path, content: bytes) -> bool:
        """Whether another manifest followed the one this change began from, so that this one is not reachable.

        A process that has continued from this one has renamed the link.
        """
        return self.folder.shown() != self._began and holds(following, content)

    def _too_late(self) -> StoreError:
        if self._began is None:
            return StoreError(f"{self.folder.path} is already a model directory: open it")
        return StoreError(f"{self.folder.path} was changed by another process, and this change was not made: try again")

    # --- sweeping --------------------------------------------------------------------------------------------

    def _sweep_up(self) -> None:
        """Remove unneeded files; what cannot be removed is removed by the next change."""
        with suppress(OSError):
            (self.folder.path / UNFINISHED).unlink(missing_ok=True)
            self._sweep(self._named)
        if not self._way_back:
            self.folder.sign()  # there is space again

    def _named(self) -> set[str]:
        """Files named by the manifest and the previous one."""
        content = self.folder.manifest_bytes()
        now = parse(content, MANIFEST)
        needed = {file.name for file in now.files()} | {File.of(undone_note(content), "json").name}
        if now.before is not None:
            needed.add(now.before.name)
            with suppress(StoreError):
                needed |= {file.name for file in parse(self.folder.read(now.before), "").files()}
        return needed

    def _sweep(self, named: Callable[[], set[str]]) -> None:
        """Remove our files that are not named; other files stay.

        They are renamed first: files named by a process that committed meanwhile are restored.
        """
        needed, aside = named(), {}
        for path in [*self._files.iterdir()]:
            if OURS.fullmatch(path.name) and path.name not in needed:
                with suppress(OSError):  # such as a folder of that name: continue with the others
                    if path.name.startswith("."):
                        path.unlink()
                    else:
                        aside[path] = path.rename(temporary(path))
        try:
            needed = named()
        except (OSError, StoreError):
            needed = {path.name for path in aside}
        for path, moved in aside.items():
            with suppress(OSError):
                if path.name in needed:
                    moved.rename(path)
                else:
                    moved.unlink()

    # --- room ------------------------------------------------------------------------------------------------

    def spend_way_back(self) -> None:
        """Allow this change, which makes the directory smaller, to delete the previous state on a full disk."""
        self._spends_way_back = True

    def refusal(self, error: OSError) -> StoreError:
        """Describe a failed change, and note a deleted previous state for `verify`, if there is space."""
        same = f"{self.folder.path} cannot be written and is unchanged"
        if self._way_back or self._began is None:
            return StoreError(f"{same}: {reason(error)}")
        with suppress(OSError):
            self._sweep(self._needed(parse(self._began, MANIFEST)))  # what was put
            self._note(self._began)
        return StoreError(
            f"{same}, but its last change cannot be undone any more: {reason(error)}, or remove the last task"
        )

    def _with_room(self, write: Callable[[], Done]) -> Done:
        try:
            return write()
        except OSError as error:
            now = self.manifest
            if error.errno not in FULL or not self._spends_way_back or not self._way_back or now is None:
                raise
        self._way_back = False
        with suppress(OSError):
            os.truncate(self.folder.path / LOCK, 0)  # which may have a block of its own
        with suppress(OSError):
            self._sweep(self._needed(now, *self._put))
        return write()

    def _needed(self, manifest: Manifest, *files: File) -> Callable[[], set[str]]:
        names = {file.name for file in (*manifest.files(), *files)}
        return lambda: names
