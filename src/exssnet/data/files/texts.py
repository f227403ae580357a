"""A user's texts: named columns of .csv, .jsonl and .parquet files, and a label column."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from exssnet.data.files.naming import label_names, settle
from exssnet.data.files.tables import (
    MOST_LINE,
    OBJECT,
    csv_rows,
    hub_names,
    open_parquet,
    parquet_columns,
    positions,
)
from exssnet.data.limits import opened, require_room
from exssnet.data.text.texts import Texts
from exssnet.encoders.base import Text
from exssnet.errors import DataError, InputError

TEXT_FILES = (".csv", ".jsonl", ".parquet")
SHOWN = 20  # names in a message


@dataclass(frozen=True)
class Columns:
    """Which columns of a file are read: those of the text, and the label's."""

    text: tuple[str, ...]  # joined by a space, or the two of a pair
    label: str | None
    pair: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            raise InputError("no text column is named: name at least one")
        if self.pair and len(self.text) != 2:
            raise InputError(f"a pair has two text columns, not {len(self.text)}: name two")
        twice = [name for name in self.text if self.text.count(name) > 1 or name == self.label]
        if twice:
            raise InputError(f"column '{twice[0]}' is named twice: name every column once")

    def joined(self, cells: Sequence[str]) -> Text:
        """One example's text from its cells."""
        return (cells[0], cells[1]) if self.pair else " ".join(cell for cell in cells if cell)


@dataclass(frozen=True)
class Rows:
    """Cells as they are written, and what each row is called in messages."""

    file: Path
    cells: list[list[Any]]  # by row, the text columns
    labels: list[Any]
    numbers: Sequence[int]
    word: str  # "line" or "row"
    own: list[str] | None = None  # what the file's metadata calls labels 0, 1, ...

    def where(self, row: int) -> str:
        return f"{self.file}, {self.word} {self.numbers[row]}"


def read_texts(file: Path, columns: Columns, classes: Sequence[str] | None = None) -> tuple[Texts, list[str]]:
    """Labelled texts of a file, and its classes; labels outside the classes given are refused."""
    rows = read_rows(file, columns)
    if columns.label is None:
        raise InputError(f"{file}: name the label column")
    names = label_names(rows.labels, rows.own, classes, rows.where)
    labels, found = settle(names, rows.own, classes, rows.where, file)
    return Texts(texts_of(rows, columns), labels), found


def read_rows(file: Path, columns: Columns) -> Rows:
    """The named columns of a file, by its kind."""
    readers: dict[str, Callable[[Path, Columns], Rows]] = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    suffix = file.suffix.lower()
    if suffix not in readers:
        raise DataError(f"{file}: unknown kind of text file '{suffix}'; give one of {', '.join(readers)}")
    rows = readers[suffix](file, columns)
    if not rows.cells:
        raise DataError(f"{file}: has no rows; give at least one example")
    return rows


def texts_of(rows: Rows, columns: Columns) -> list[Text]:
    """The texts of rows; an empty cell is an empty text, anything that is not a text is refused."""
    found: list[Text] = []
    for row, cells in enumerate(rows.cells):
        plain = []
        for name, cell in zip(columns.text, cells, strict=True):
            if cell is None:
                cell = ""
            if not isinstance(cell, str):
                raise DataError(
                    f"{rows.where(row)}, column '{name}': is a {type(cell).__name__}, not text; name a text column"
                )
            if "\0" in cell:
                raise DataError(f"{rows.where(row)}, column '{name}': holds a NUL byte; the file is not text")
            plain.append(cell)
        found.append(columns.joined(plain))
    return found


def read_parquet_texts(
    file: Path, text: tuple[str, ...], label: str, pair: bool, classes: int
) -> tuple[Texts, tuple[str, ...]]:
    """A file in the hub's layout, with its numbers as labels; and the names that its metadata gives to them."""
    columns = Columns(text, label, pair)
    rows = _parquet(file, columns)
    for row, value in enumerate(rows.labels):
        if not isinstance(value, int) or not 0 <= value < classes:
            raise DataError(f"{file}, row {row}: label {value} is not in 0 to {classes - 1}")
    names = rows.own if rows.own and len(rows.own) == classes else [str(number) for number in range(classes)]
    return Texts(texts_of(rows, columns), torch.tensor(rows.labels, dtype=torch.int64)), tuple(names)


def _csv(file: Path, columns: Columns) -> Rows:
    cells, labels, lines = [], [], []
    with csv_rows(file, "; put texts with commas or line ends in quotes") as (header, rows):
        places = positions(file, header, columns.text)
        label_at = None if columns.label is None else positions(file, header, [columns.label])[0]
        for line, row in rows:
            cells.append([row[at] for at in places])
            if label_at is not None:
                labels.append(row[label_at])
            lines.append(line)
    return Rows(file, cells, labels, lines, "line")


def _jsonl(file: Path, columns: Columns) -> Rows:
    cells, labels, lines = [], [], []
    with _json_lines(file) as found:
        for number, row in found:
            wanted = [*columns.text, *([columns.label] if columns.label is not None else [])]
            missing = [name for name in wanted if name not in row]
            if missing:
                listed = ", ".join(list(row)[:SHOWN])
                raise DataError(f"{file}, line {number}: no column '{missing[0]}'; it has {listed}")
            cells.append([row[name] for name in columns.text])
            if columns.label is not None:
                labels.append(row[columns.label])
            lines.append(number)
    return Rows(file, cells, labels, lines, "line")


def _parquet(file: Path, columns: Columns) -> Rows:
    parquet = open_parquet(file)
    names = [*columns.text, *([columns.label] if columns.label is not None else [])]
    positions(file, parquet.schema_arrow.names, names)
    require_room(file, parquet.metadata.num_rows * OBJECT * len(names))
    found = parquet_columns(file, parquet, names)
    texts = found[: len(columns.text)]
    labels = found[-1] if columns.label is not None else []
    own = None if columns.label is None else hub_names(parquet, columns.label)
    return Rows(file, [list(row) for row in zip(*texts, strict=True)], labels, range(len(texts[0])), "row", own)


@contextmanager
def _json_lines(file: Path) -> Iterator[Iterator[tuple[int, dict[str, Any]]]]:
    try:
        with opened(file) as content, TextIOWrapper(content, "utf-8-sig", newline="\n") as stream:
            yield _objects(file, stream)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 text ({error.reason}); save it as JSON lines in UTF-8") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _objects(file: Path, stream: TextIOWrapper) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    while line := stream.readline(MOST_LINE):
        number += 1
        if len(line) == MOST_LINE:
            raise DataError(f"{file}, line {number}: has {MOST_LINE:,} signs; give one object in a line")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise DataError(f"{file}, line {number}: is not JSON ({why}); give one object in a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {number}: is a {type(row).__name__}; give one object in a line")
        yield number, row
