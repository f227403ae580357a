"""The files of examples: enough to find them again, and to check that they are unchanged."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from exssnet.data.files.pictures import class_folders, image_files
from exssnet.data.limits import opened
from exssnet.errors import DataError
from exssnet.io.typed import Between, Length, Matching

CHUNK = 2**20


@dataclass(frozen=True)
class Recorded:
    """A file, or a folder of images: its path as given, and its content."""

    path: Annotated[str, Length(1, 4096)]
    sha256: Annotated[str, Matching("[0-9a-f]{64}", "a SHA-256 in hexadecimal")]  # of a folder: of its list of images
    size: Annotated[int, Between(0, 2**63)]  # in bytes, of all files together

    def require_unchanged(self) -> Path:
        """The path, if its content is unchanged; the size is checked first."""
        path = Path(self.path).expanduser()
        if not path.exists():
            raise DataError(f"{self.path} does not exist any more")
        if sum(file.stat().st_size for file in _files(path)) != self.size or _digest(path) != self.sha256:
            raise DataError(f"{self.path} has changed")
        return path


def record(path: Path) -> Recorded | None:
    """Record a path; None if its name cannot be stored as text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return None
    return Recorded(str(path), _digest(path), sum(file.stat().st_size for file in _files(path)))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [file for folder in class_folders(path) for file in image_files(folder)]


def _digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, of a line `DIGEST PATH` per image, in reading order."""
    if not path.is_dir():
        return _content(path).hexdigest()
    total = hashlib.sha256()
    for file in _files(path):
        total.update(f"{_content(file).hexdigest()} ".encode() + os.fsencode(file.relative_to(path)) + b"\n")
    return total.hexdigest()


def _content(file: Path) -> hashlib._Hash:
    found = hashlib.sha256()
    with opened(file) as stream:
        while chunk := stream.read(CHUNK):
            found.update(chunk)
    return found
