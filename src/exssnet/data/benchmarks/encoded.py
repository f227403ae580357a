"""Encoded images on disk, read one at a time: image files, or unpacked parquet files."""

from __future__ import annotations

import bisect
import os
from abc import ABC, abstractmethod
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch

from exssnet.data.benchmarks.cache import fingerprint, write_tensors
from exssnet.data.benchmarks.parquet import encoded_groups
from exssnet.errors import DataError, ParseError
from exssnet.io import parse
from exssnet.io.disk import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

    from exssnet.data.benchmarks.registry import Source


MOST_BYTES = 2**28  # of one encoded image


class Encoded(ABC):
    """Encoded images by row, safe to read from several threads."""

    @abstractmethod
    def read(self, row: int) -> tuple[bytes, str]:
        """The bytes of one image, and their location for messages."""


class ImageFiles(Encoded):
    """One file per image."""

    def __init__(self, files: list[str]) -> None:
        self._files = files  # strings, because a million Path objects take a gigabyte

    def read(self, row: int) -> tuple[bytes, str]:
        file = self._files[row]
        try:
            return parse.read(Path(file), MOST_BYTES), file
        except ParseError as error:
            raise DataError(f"{error}; replace it by an image") from error
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from error


class ParquetImages(Encoded):
    """Rows of parquet files, with a pack per file.

    Parquet reads whole compressed row groups, so one image of a shuffled set costs reading a hundred. Therefore the
    encoded bytes of each file are written once, contiguously, into the cache, where one image is one read. A pack per
    file (not per task) reads the source once for any number of tasks, and finished packs survive a killed run. The
    packs take as much disk space as the source.
    """

    def __init__(self, source: Source, files: list[Path], counts: list[int]) -> None:
        self._source = source
        self._files = files
        self._ends = list(accumulate(counts))
        self._packs: dict[int, Pack] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[ParquetImages], tuple[Source, list[Path], list[int]]]:
        counts = [end - start for start, end in pairwise([0, *self._ends])]
        return ParquetImages, (self._source, self._files, counts)

    def read(self, row: int) -> tuple[bytes, str]:
        number = bisect.bisect_right(self._ends, row)
        inside = row - (self._ends[number - 1] if number else 0)
        return self._pack(number).read(inside), f"{self._files[number]}, row {inside}"

    def _pack(self, number: int) -> Pack:
        with self._lock:
            if number not in self._packs:
                self._packs[number] = open_pack(self._files[number], self._source)
            return self._packs[number]


class Pack:
    """Contiguous encoded images in one safetensors file, mapped into memory."""

    def __init__(self, file: Path) -> None:
        from safetensors.torch import load_file

        parse.require_regular(file)
        tensors = load_file(file)
        self._bytes: Tensor = tensors["bytes"]  # uint8 [total]
        self._ends: list[int] = tensors["ends"].tolist()

    def read(self, row: int) -> bytes:
        start = self._ends[row - 1] if row else 0
        return self._bytes[start : self._ends[row]].numpy().tobytes()


def open_pack(file: Path, source: Source) -> Pack:
    """Open the pack of a parquet file; create it if it is missing or damaged."""
    from safetensors import SafetensorError

    target = cache_folder() / "packs" / f"{source.name}-{fingerprint([file], 'pack')}.safetensors"
    try:
        return Pack(target)
    except (OSError, ParseError, SafetensorError, KeyError):
        _write_pack(target, file, source)
        return Pack(target)


def _write_pack(target: Path, file: Path, source: Source) -> None:
    images = [image or b"" for group in encoded_groups(file, source) for image in group]
    ends = torch.tensor(list(accumulate(map(len, images))), dtype=torch.int64)
    joined = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
    try:
        write_tensors(target, {"bytes": joined, "ends": ends}, {"source": file.name})
    except OSError as error:
        raise DataError(
            f"cannot write {os.path.getsize(file) >> 20} MiB of unpacked images to {target.parent} "
            f"({error.strerror}): set EXSSNET_CACHE to a writable folder with enough space for the data set"
        ) from error
