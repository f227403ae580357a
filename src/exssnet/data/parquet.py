"""Images in the hub's parquet layout: a struct of encoded bytes and an integer label per row."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exssnet.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

    from exssnet.data.registry import Source

SMALL = 48 * 48  # pixels
CHUNK = 256  # images per piece of work: enough that the threads seldom meet at the queue


def decode(files: list[Path], source: Source) -> tuple[Tensor, Tensor]:
    """All images uint8 [N, C, H, W] and labels int64 [N] of some parquet files, in their order."""
    labels = [read_labels(file, source) for file in files]
    images = np.empty((sum(map(len, labels)), *source.shape), np.uint8)
    start = 0
    for file, found in zip(files, labels, strict=True):
        _decode_file(file, source, images[start : start + len(found)])
        start += len(found)
    return torch.from_numpy(images), torch.cat(labels)


def _decode_file(file: Path, source: Source, out: NDArray[np.uint8]) -> None:
    def decode_chunk(first: int, encoded: list[bytes | None]) -> None:
        for row, item in enumerate(encoded, first):
            image = open_image(item, f"{file}, row {row}", "L" if source.shape[0] == 1 else "RGB")
            out[row] = _pixels(image, source, f"{file}, row {row}")

    # PIL lets go of the interpreter lock while it decodes. With small images that is the lesser part of the work, and
    # two threads take longer than one.
    small = source.shape[1] * source.shape[2] <= SMALL
    with ThreadPoolExecutor(1 if small else os.cpu_count()) as pool:
        row = 0
        for group in encoded_groups(file, source):
            pieces = range(0, len(group), CHUNK)
            work = [pool.submit(decode_chunk, row + at, group[at : at + CHUNK]) for at in pieces]
            for piece in work:
                piece.result()
            row += len(group)


def open_image(encoded: bytes | None, where: str, mode: str) -> Image:
    """One decoded image in a PIL mode (`L` or `RGB`)."""
    from PIL import Image

    if not encoded:
        raise DataError(f"{where}: no image bytes; the file is not whole, fetch it again")
    try:
        return Image.open(BytesIO(encoded)).convert(mode)
    except Exception as error:  # damaged bytes raise anything: OSError, SyntaxError, struct.error, ...
        raise DataError(f"{where}: the image cannot be decoded ({error}); fetch the file again") from error


def _pixels(image: Image, source: Source, where: str) -> NDArray[np.uint8]:
    _, height, width = source.shape
    if image.size != (width, height):
        raise DataError(
            f"{where}: the image has {image.width}×{image.height} pixels, {source.name} has {width}×{height}"
        )
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def encoded_groups(file: Path, source: Source) -> Iterator[list[bytes | None]]:
    """The encoded bytes of one row group after the other, so that memory holds one at a time."""
    parquet = open_parquet(file, source)
    for group in range(parquet.num_row_groups):
        column = parquet.read_row_group(group, columns=[source.image_column])[source.image_column]
        yield [item and item["bytes"] for item in column.to_pylist()]


def read_labels(file: Path, source: Source) -> Tensor:
    """The label column of a file, int64 [N], every label checked."""
    labels = open_parquet(file, source).read(columns=[source.label_column])[source.label_column].to_pylist()
    for row, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < source.classes:
            raise DataError(f"{file}, row {row}: label {label} is not in 0 to {source.classes - 1}")
    return torch.tensor(labels, dtype=torch.int64)


def class_names(file: Path, source: Source) -> list[str]:
    """The names in the parquet's `huggingface` metadata, or numbers where it does not name every class."""
    metadata = open_parquet(file, source).schema_arrow.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = [str(name) for name in features[source.label_column]["names"]]
    except (KeyError, TypeError, ValueError):
        names = []
    return names if len(names) == source.classes else [str(label) for label in range(source.classes)]


def open_parquet(file: Path, source: Source) -> Any:
    """A `pyarrow.parquet.ParquetFile` (untyped) that has the source's columns."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        parquet = ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: not readable as parquet ({error}); fetch the file again") from error
    schema = parquet.schema_arrow
    for column in (source.image_column, source.label_column):
        if column not in schema.names:
            raise DataError(f"{file}: no column '{column}'; it has {', '.join(schema.names)}")
    image = schema.field(source.image_column).type
    if not (pa.types.is_struct(image) and image.get_field_index("bytes") >= 0):
        raise DataError(f"{file}: column '{source.image_column}' holds {image}, expected a struct with 'bytes'")
    return parquet
