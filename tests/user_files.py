"""Files as users bring them: digits as images, tables, rows of the hub, a network, an image that is a bomb."""

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

DIGITS = load_digits()
PIXELS = (DIGITS.images * 15.9375).astype(np.uint8)


def picture_folder(place: Path, classes: tuple[int, ...], each: int = 60) -> Path:
    for label in classes:
        (place / f"digit-{label}").mkdir(parents=True)
        for row in np.flatnonzero(DIGITS.target == label)[:each]:
            Image.fromarray(PIXELS[row]).save(place / f"digit-{label}/{row:04}.png")
    return place


def hub_rows(source: Path, target: Path, label: str, classes: list[int], each: int) -> Path:
    """The first rows of some classes, as the hub has them."""
    table = pq.ParquetFile(source).read_row_group(0).slice(0, 6000)
    rows = [pc.indices_nonzero(pc.equal(table[label], wanted))[:each] for wanted in classes]
    pq.write_table(table.take(pa.concat_arrays(rows)), target)
    return target


def names(file: Path, label: str) -> list[str]:
    facts = json.loads(pq.read_schema(file).metadata[b"huggingface"])
    return facts["info"]["features"][label]["names"]


def csv_file(file: Path, data: np.ndarray, columns: list[str], labels: list[str]) -> Path:
    rows = [",".join([*map(repr, map(float, row)), label]) for row, label in zip(data, labels, strict=True)]
    file.write_text("\n".join([",".join([*columns, "state"]), *rows]) + "\n")
    return file


def bomb() -> bytes:
    """A PNG of 60,000 × 60,000 pixels in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(7501))) + chunk(b"IEND", b"")


NETWORK = """
from torch import nn

def network(hidden=40):  # drawn anew in every process
    module = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2)
    )
    module[0].requires_grad_(False)
    return module

def other():
    return network(41)

def number():
    return 7

def broken():
    raise KeyError("no such")
"""
