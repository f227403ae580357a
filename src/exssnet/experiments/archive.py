"""Records of many runs in one file, `records.jsonl.gz`: gzip of one line of JSON per run, as in `results.json`.

Nothing is unpacked to disk, and no name in the file is a path. Lines are read one at a time, each with the limits of
a record, so that memory stays small whatever the file would expand to.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from exssnet.errors import RunError
from exssnet.experiments import record
from exssnet.experiments.record import Record
from exssnet.io import parse
from exssnet.io.typed import line as one_line

NAME = "records.jsonl.gz"
MOST = 64 * parse.MEBIBYTE  # of the file
MOST_EXPANDED = 512 * parse.MEBIBYTE  # of all lines; 100 runs take about 0.4 MiB


def read(file: Path) -> Iterator[tuple[str, Record]]:
    """Yield every record of the file, with its line for messages."""
    try:
        with parse.opened(file, MOST, file.parent) as (compressed, _), gzip.open(compressed) as lines:
            yield from _records(file, lines)
    except parse.ParseError as error:
        raise RunError(str(error)) from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise RunError(f"{file} is not a complete gzip file ({one_line(error)}): copy it again") from error
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error


def _records(file: Path, lines: gzip.GzipFile) -> Iterator[tuple[str, Record]]:
    left, number = MOST_EXPANDED, 0
    while content := lines.readline(min(parse.JSON.size, left) + 1):
        number += 1
        left -= len(content)
        where = f"{file}, line {number}"
        if left < 0:
            raise RunError(f"{file} expands to more than {MOST_EXPANDED:,} bytes: split it into several files")
        yield where, record.typed_record(parse.from_json(content, where), where)
    if not number:
        raise RunError(f"{file} is empty: at least one record was expected")
