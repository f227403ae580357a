"""Files of word vectors: GloVe and fastText text, plain or packed, and JSON as wink-embeddings has it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from exssnet.encoders.base import MOST_TOKENS
from exssnet.encoders.words import MOST_WIDTH, Vector, WordVectors
from exssnet.errors import DataError

SUFFIXES = (".txt", ".vec", ".txt.gz", ".vec.gz", ".json")
MOST_BYTES = 32 * 10**9  # of a file, unpacked
MOST_LINE = 2**20
PACKED = b"\x1f\x8b"


def is_vectors(path: Path) -> bool:
    """Whether a file's name says that it has word vectors."""
    return path.name.lower().endswith(SUFFIXES)


def read_vectors(path: Path, limit: int = MOST_TOKENS) -> WordVectors:
    """The vectors of a file. Where a word is there twice, the first one counts, as it does in GloVe's own tools."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        words, table = _from_json(path) if path.suffix.lower() == ".json" else _from_text(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); fetch the file again") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}); give word vectors in GloVe's format") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return WordVectors(str(path), digest, words, table, limit)


def _from_text(path: Path) -> tuple[dict[str, int], Vector]:
    """A word and its numbers in a line, with spaces between; fastText has a line with two numbers before them."""
    words: dict[str, int] = {}
    rows: list[Vector] = []
    width = 0
    with _lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            cells = line.rstrip(" \r\n").split(" ")
            if number == 1 and len(cells) == 2 and all(cell.isdecimal() for cell in cells):
                width = int(cells[1])  # fastText: how many words, and how long their vectors are
                continue
            width = width or len(cells) - 1
            if not 1 <= width <= MOST_WIDTH or len(cells) <= width:
                raise DataError(f"{path}, line {number}: {len(cells) - 1} numbers after a word, not {max(width, 1)}")
            word = " ".join(cells[:-width])  # GloVe's 840B has words with spaces in them
            try:
                row = np.array(cells[-width:], np.float32)
            except ValueError:
                raise DataError(f"{path}, line {number}: a word and {width} numbers were expected") from None
            if word not in words:
                words[word] = len(rows)
                rows.append(row)
    return words, _table(path, rows)


def _from_json(path: Path) -> tuple[dict[str, int], Vector]:
    """An object of words and lists of numbers, or one that has it under `vectors`.

    wink appends to each vector its length and the rank of its word; `dimensions` says how many numbers count.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({error}); give word vectors as JSON or as text") from error
    vectors = found.get("vectors", found) if isinstance(found, dict) else None
    if not isinstance(vectors, dict) or not vectors or not all(isinstance(row, list) for row in vectors.values()):
        raise DataError(f"{path}: an object with a list of numbers for each word was expected")
    width = found.get("dimensions") if "vectors" in found else None
    rows = []
    for word, row in vectors.items():
        try:
            rows.append(np.array(row[:width], np.float32))
        except (TypeError, ValueError):
            raise DataError(f"{path}: the vector of {word!r} is not a list of numbers") from None
    return {word: at for at, word in enumerate(vectors)}, _table(path, rows)


def _table(path: Path, rows: list[Vector]) -> Vector:
    if not rows or len({row.shape for row in rows}) > 1 or not rows[0].size:
        raise DataError(f"{path}: holds no words with vectors of one length")
    table = np.stack(rows)
    if not np.isfinite(table).all():
        raise DataError(f"{path}: has a vector that is not finite; fetch the file again")
    return table


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    with path.open("rb") as file:
        packed = file.read(2) == PACKED
        file.seek(0)
        content = cast(IO[bytes], gzip.GzipFile(fileobj=file) if packed else file)
        with io.TextIOWrapper(content, "utf-8", newline="\n") as text:
            yield _counted(path, text)


def _counted(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    done = 0
    while line := text.readline(MOST_LINE):
        done += len(line)
        if len(line) == MOST_LINE or done > MOST_BYTES:
            raise DataError(f"{path}: is too large, or has a line of {MOST_LINE:,} signs; give a file of word vectors")
        yield line
