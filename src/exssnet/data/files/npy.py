"""Read a user's NumPy files; headers are checked before any array is unpacked."""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from exssnet.data.limits import opened, require_room
from exssnet.errors import DataError, ExssnetError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ONLY = ""  # the name of the array of a .npy
ZIP = b"PK"


@dataclass(frozen=True)
class Header:
    """The header of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] of {self.dtype}"


def headers(file: Path) -> dict[str, Header]:
    """Headers of the arrays in an .npz by name, or of the one in a .npy under ''."""
    with _reading(file), opened(file) as stream:
        if stream.read(2) != ZIP:
            size = stream.seek(0, 2)
            stream.seek(0)
            return {ONLY: _header(stream, size)}
        found = {}
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            twice = [name for name, times in Counter(member.filename for member in members).items() if times > 1]
            if twice:
                raise DataError(f"{file}: has array '{twice[0]}' twice; save it again")
            for member in members:
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as packed:
                    found[name] = _header(packed, member.file_size)
    if not found:
        raise DataError(f"{file}: has no arrays; save inputs as x and labels as y")
    return found


def read(file: Path, *names: str) -> list[NDArray[Any]]:
    """Read arrays after checking that they fit into memory."""
    known = headers(file)
    require_room(file, sum(known[name].bytes for name in set(names)))
    with _reading(file), opened(file) as stream:
        found = np.load(stream, allow_pickle=False)
        return [found] if isinstance(found, np.ndarray) else [found[name] for name in names]


def _header(stream: IO[bytes], size: int) -> Header:
    """Parse the header of an array in a file of `size` bytes."""
    version = np.lib.format.read_magic(stream)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which must be unpickled")
    header = Header(shape, dtype)
    if stream.tell() + header.bytes > size:
        raise ValueError(f"an array {header} in a file of {size:,} bytes")
    return header


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except ExssnetError:
        raise
    except Exception as error:  # damaged files raise any exception: EOFError, BadZipFile, zlib.error, MemoryError, ...
        if "pickle" in str(error) or "magic string is not correct" in str(error):
            raise DataError(
                f"{file}: has Python objects or is not a NumPy file; objects are never unpickled, save numeric arrays"
            ) from None
        if isinstance(error, OSError) and error.strerror:  # an error of the system, not of NumPy
            raise DataError(f"{file}: cannot be read ({error.strerror})") from error
        why = " ".join(str(error).split())
        raise DataError(f"{file}: not readable as a NumPy file ({why}); save it again") from error
