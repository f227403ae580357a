"""Read a user's tables: numeric columns of .csv and .parquet files, the label column, and images in parquet.

Messages count as other programs do: lines of a .csv as in an editor, with the header in line 1, and rows of a
.parquet from 0.
"""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exssnet.data.files.naming import plain_number
from exssnet.data.files.pictures import fit_all
from exssnet.data.limits import opened, require_readable, require_room
from exssnet.errors import DataError, ExssnetError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Row numbers written by pandas: in a file sorted by class they reveal the label.
INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
BATCH = 1024  # bytes of encoded images in memory
TOGETHER = 256  # columns read together: one by one, thousands would take minutes
NUMBER = 12  # bytes per cell while reading: float64 and float32
OBJECT = 60  # bytes per label while reading
MOST_LINE = 2**26  # characters in a line of a .csv
SHOWN = 20  # columns named in a message
NUMBERS_ONLY = "text is not supported; encode this column as numbers or remove it"


@dataclass(frozen=True)
class Table:
    """Numbers float32 [N, F], and the position of each row in the file."""

    file: Path
    columns: list[str]
    values: Tensor
    rows: Sequence[int]
    word: str  # "line" or "row"
    labels: list[Any]  # as written; empty if not requested
    own: list[str] | None = None  # names of labels 0, 1, ... in the file's metadata

    def where(self, row: int) -> str:
        return f"{self.file}, {self.word} {self.rows[row]}"


def read_table(file: Path, label: str | None, columns: Sequence[str] | None = None) -> Table:
    """The given columns, or all except the label and the row numbers of pandas."""
    return (read_csv if file.suffix.lower() == ".csv" else read_parquet)(file, label, columns)


def read_csv(file: Path, label: str | None, columns: Sequence[str] | None) -> Table:
    """Rows after a header, separated by commas, semicolons or tabs."""
    values, labels, lines = array("d"), [], []
    with csv_rows(file) as (header, rows):
        label_at = None if label is None else positions(file, header, [label])[0]
        columns = _features(file, header, label) if columns is None else list(columns)
        places = positions(file, header, columns)
        for line, row in rows:
            cells = [row[at] for at in places]
            together = "".join(cells)
            try:
                if (
                    "_" in together or not together.isascii()
                ):  # like `plain_number`, but once per row, which is much faster
                    raise ValueError
                values.extend(map(float, cells))
            except ValueError:
                raise _bad_cell(f"{file}, line {line}", columns, cells) from None
            if label_at is not None:
                labels.append(row[label_at])
            lines.append(line)
    if not lines:
        raise DataError(f"{file}: has no rows after its header; give at least one example")
    numbers = _float32(np.frombuffer(values).reshape(len(lines), len(columns)))
    table = Table(file, columns, torch.from_numpy(numbers), lines, "line", labels)
    _check_finite(table)
    return table


def read_parquet(file: Path, label: str | None, columns: Sequence[str] | None) -> Table:
    """All row groups; whole numbers, floats and booleans are numbers, anything else is not."""
    import pyarrow as pa

    parquet = open_parquet(file)
    schema = parquet.schema_arrow
    if label is not None:
        positions(file, schema.names, [label])
    columns = _features(file, schema.names, label) if columns is None else list(columns)
    for column, at in zip(columns, positions(file, schema.names, columns), strict=True):
        kind = schema.field(at).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise DataError(f"{file}, column '{column}': holds {kind}, {NUMBERS_ONLY}")
    require_room(file, parquet.metadata.num_rows * len(columns) * NUMBER)
    numbers = []
    for some in (columns[at : at + TOGETHER] for at in range(0, len(columns), TOGETHER)):
        for column, cells in zip(some, _columns(file, parquet, some), strict=True):
            if cells.null_count:
                empty = int(np.flatnonzero(cells.is_null().to_numpy())[0])
                raise DataError(f"{file}, row {empty}, column '{column}': is empty; fill it or remove the row")
            numbers.append(_float32(cells.to_numpy()))
    labels, own = ([], None) if label is None else parquet_labels(file, label)
    values = torch.from_numpy(np.stack(numbers, axis=1))
    table = Table(file, columns, values, range(len(values)), "row", labels, own)
    _check_finite(table)
    return table


def parquet_labels(file: Path, label: str) -> tuple[list[Any], list[str] | None]:
    """The label column as written, and the names of labels 0, 1, ... in the hub's metadata."""
    parquet = open_parquet(file)
    positions(file, parquet.schema_arrow.names, [label])
    require_room(file, parquet.metadata.num_rows * OBJECT)
    return parquet_columns(file, parquet, [label])[0], hub_names(parquet, label)


def parquet_columns(file: Path, parquet: Any, names: Sequence[str]) -> list[list[Any]]:
    """Columns as they are written."""
    with _arrow(file):
        return [cells.to_pylist() for cells in _columns(file, parquet, names)]


def hub_names(parquet: Any, label: str) -> list[str] | None:
    """What the hub's metadata calls the labels 0, 1, ..., where it names each its own."""
    own = [str(name) for name in _hub_features(parquet).get(label, {}).get("names") or []]
    return own if own and len(set(own)) == len(own) else None


def label_column(file: Path, label: str | None) -> str:
    """The given column, or in a parquet the one that its metadata marks as labels, or `label`."""
    if label is not None:
        return label
    if file.suffix.lower() == ".csv":
        with csv_rows(file) as (columns, _):
            pass
        marked = []
    else:
        parquet = open_parquet(file)
        columns, features = parquet.schema_arrow.names, _hub_features(parquet)
        marked = [name for name in columns if "names" in features.get(name, {})]
        marked = marked or [name for name in columns if name == "label"]
    if len(marked) != 1:
        raise InputError(f"{file}: give the label column (--label), one of {_listed(columns)}")
    return str(marked[0])


def image_column(file: Path) -> str | None:
    """The column of encoded images in the hub's layout, if there is one."""
    import pyarrow as pa

    for field in open_parquet(file).schema_arrow:
        if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            return str(field.name)
    return None


def parquet_images(file: Path, column: str, shape: tuple[int, int, int], rows: Tensor | None = None) -> Tensor:
    """Read images of a parquet in the hub's layout, or of some rows in ascending order: uint8 [N, C, H, W]."""
    parquet = open_parquet(file)
    wanted = set(range(parquet.metadata.num_rows) if rows is None else rows.tolist())
    require_room(file, len(wanted) * math.prod(shape))
    images = np.empty((len(wanted), *shape), np.uint8)
    start = done = 0
    with _arrow(file):
        for batch in parquet.iter_batches(BATCH, columns=[column]):
            inside = [row for row in range(len(batch)) if start + row in wanted]
            items = batch.column(0).to_pylist()
            encoded = [items[row] and items[row]["bytes"] for row in inside]
            places = [f"{file}, row {start + row}" for row in inside]
            fit_all(encoded, places, images[done : done + len(inside)])
            start, done = start + len(batch), done + len(inside)
    _check_whole(file, start, parquet)
    return torch.from_numpy(images)


def open_parquet(file: Path) -> Any:
    """Open a `pyarrow.parquet.ParquetFile` (untyped) with at least one row."""
    from pyarrow.parquet import ParquetFile

    require_readable(file)
    with _arrow(file):
        parquet = ParquetFile(file)
        groups = (parquet.metadata.row_group(group) for group in range(parquet.num_row_groups))
        _check_whole(file, sum(group.num_rows for group in groups), parquet)
        _check_names(file, parquet.schema_arrow.names)
    if not parquet.metadata.num_rows:
        raise DataError(f"{file}: has no rows; give at least one example")
    return parquet


@contextmanager
def csv_rows(file: Path, advice: str = "") -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Read the header of a .csv, with distinct names, and its rows with their lines; `advice` ends row errors."""
    try:
        with opened(file) as content, TextIOWrapper(content, "utf-8-sig", newline="") as stream:
            first = next(_lines(stream, file), "")
            stream.seek(0)
            reader = csv.reader(_lines(stream, file), delimiter=max(",;\t", key=first.count))
            header = [name.strip() for name in next(reader, [])]
            if not any(header):
                raise DataError(f"{file}: the first line is empty; give a header, then one line per example")
            _check_names(file, header)
            yield header, _whole_rows(file, reader, len(header), advice)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 text ({error.reason}); save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not readable as CSV ({error})") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _whole_rows(file: Path, reader: Any, columns: int, advice: str) -> Iterator[tuple[int, list[str]]]:
    """The line and the cells of each row, as many as there are columns; blank lines are left out."""
    for row in reader:
        if len(row) == columns:
            yield reader.line_num, row
        elif "".join(row).strip():
            raise DataError(
                f"{file}, line {reader.line_num}: {len(row)} cells, but the header has {columns} columns{advice}"
            )


def _lines(stream: TextIOWrapper, file: Path) -> Iterator[str]:
    while line := stream.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise DataError(f"{file}: has a line of {MOST_LINE:,} characters; give a table with one example per line")
        yield line


@contextmanager
def _arrow(file: Path) -> Iterator[None]:
    try:
        yield
    except ExssnetError:
        raise
    except Exception as error:  # damaged files raise any exception: OSError, ArrowInvalid, UnicodeDecodeError, ...
        why = " ".join(str(error).split())
        raise DataError(f"{file}: not readable as parquet ({why}); save or download it again") from error


def _columns(file: Path, parquet: Any, names: Sequence[str]) -> list[Any]:
    with _arrow(file):
        found = parquet.read(columns=list(names))
        cells = [found[name] for name in names]
    _check_whole(file, len(found), parquet)
    return cells


def _check_whole(file: Path, rows: int, parquet: Any) -> None:
    """Refuse files with missing rows: Arrow skips some kinds of damage."""
    if rows != parquet.metadata.num_rows:
        raise DataError(f"{file}: has {rows} of its {parquet.metadata.num_rows} rows; save or download it again")


def _hub_features(parquet: Any) -> dict[str, dict[str, Any]]:
    """The hub's metadata of each column."""
    metadata = parquet.schema_arrow.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _check_names(file: Path, columns: Sequence[str]) -> None:
    twice = [name for name, times in Counter(columns).items() if name and times > 1]
    if twice:
        raise DataError(f"{file}: column '{twice[0]}' occurs more than once; give every column another name")


def positions(file: Path, columns: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Where the wanted columns are among all columns of a file."""
    at = {name: number for number, name in reversed([*enumerate(columns)])}
    for name in wanted:
        if name not in at:
            raise DataError(f"{file}: no column '{name}'; it has {_listed(columns)}")
    return [at[name] for name in wanted]


def _listed(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - SHOWN:,} more" if len(columns) > SHOWN else ""
    return ", ".join(columns[:SHOWN]) + more


def _features(file: Path, columns: Iterable[str], label: str | None) -> list[str]:
    features = [column for column in columns if column != label and not INDEX.fullmatch(column)]
    if not features:
        raise DataError(f"{file}: has no column besides the label '{label}'; give at least one numeric column")
    return features


def _bad_cell(where: str, columns: Sequence[str], cells: Sequence[str]) -> DataError:
    """The error for the first cell that is not a number."""
    for column, cell in zip(columns, cells, strict=True):
        try:
            plain_number(cell)
        except ValueError:
            if not cell.strip():
                return DataError(f"{where}, column '{column}': is empty; fill it or remove the row")
            shown = cell if len(cell) <= 40 else f"{cell[:40]}..."
            return DataError(f"{where}, column '{column}': {shown!r} is not a number, {NUMBERS_ONLY}")
    raise AssertionError("every cell is a number")


def _float32(numbers: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(
        over="ignore"
    ):  # values too large for float32 become infinite, and are refused with their position
        return numbers.astype(np.float32)


def _check_finite(table: Table) -> None:
    wrong = (~table.values.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"{table.where(row)}, column '{table.columns[column]}': "
            f"is {float(table.values[row, column])} in float32; fill it or remove the row"
        )
