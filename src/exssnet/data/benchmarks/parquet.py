"""Images in the hub's parquet layout: a struct of encoded bytes and an integer label per row."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exssnet.data.limits import require_readable
from exssnet.data.pixels import decoder
from exssnet.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from exssnet.data.benchmarks.registry import Source

CHUNK = 256  # images per unit of work: large enough that threads rarely contend for the queue


def decode(files: list[Path], source: Source) -> tuple[Tensor, Tensor]:
    """Read all images uint8 [N, C, H, W] and labels int64 [N] of parquet files, in order."""
    labels = [read_labels(file, source) for file in files]
    images = np.empty((sum(map(len, labels)), *source.shape), np.uint8)
    start = 0
    with decoder(len(images), source.shape) as (decode_piece, threads), ThreadPoolExecutor(threads) as pool:

        def put(file: Path, row: int, encoded: list[bytes | None], at: int) -> None:
            images[at : at + len(encoded)] = decode_piece(encoded, source.shape, str(file), row)

        for file, found in zip(files, labels, strict=True):
            row = 0
            for group in encoded_groups(file, source):
                pieces = [(row + at, group[at : at + CHUNK]) for at in range(0, len(group), CHUNK)]
                for piece in [pool.submit(put, file, first, encoded, start + first) for first, encoded in pieces]:
                    piece.result()
                row += len(group)
            start += len(found)
    return torch.from_numpy(images), torch.cat(labels)


def encoded_groups(file: Path, source: Source) -> Iterator[list[bytes | None]]:
    """Yield the encoded bytes of each row group, with one in memory at a time."""
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
    """Class names from the `huggingface` metadata, or numbers if it does not name every class."""
    metadata = open_parquet(file, source).schema_arrow.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = [str(name) for name in features[source.label_column]["names"]]
    except (KeyError, TypeError, ValueError):
        names = []
    return names if len(names) == source.classes else [str(label) for label in range(source.classes)]


def open_parquet(file: Path, source: Source) -> Any:
    """Open a `pyarrow.parquet.ParquetFile` (untyped) that has the source's columns."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    require_readable(file)
    try:
        parquet = ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: not readable as parquet ({error}); download the file again") from error
    schema = parquet.schema_arrow
    for column in (source.image_column, source.label_column):
        if column not in schema.names:
            raise DataError(f"{file}: no column '{column}'; it has {', '.join(schema.names)}")
    image = schema.field(source.image_column).type
    if not (pa.types.is_struct(image) and image.get_field_index("bytes") >= 0):
        raise DataError(f"{file}: column '{source.image_column}' has {image}, expected a struct with 'bytes'")
    return parquet
