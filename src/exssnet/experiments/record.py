"""Read the record of a finished run, `results.json`; docs/reference/run-record.md describes every field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from exssnet.errors import RunError
from exssnet.experiments.config import RunConfig
from exssnet.io import parse
from exssnet.io.parse import Between, Length, ParseError
from exssnet.io.typed import short

Name = Annotated[str, Length(1, 200)]
Percent = Annotated[float, Between(0, 100)]
Change = Annotated[float, Between(-100, 100)]  # of an accuracy
Count = Annotated[int, Between(0, 2**53)]


@dataclass(frozen=True)
class Proof:
    """Whether every task is unchanged since it was learned."""

    verified: bool
    digests: dict[str, str]
    changed: list[str]


@dataclass(frozen=True)
class Transfer:
    """Which task lent its mask."""

    lender: Name | None
    accuracies: dict[str, float]


@dataclass(frozen=True)
class Seconds:
    """Time in total, and of the phases of each task."""

    total: Annotated[float, Between(0, 1e12)]
    tasks: list[dict[str, float]]


@dataclass(frozen=True)
class TextCounts:
    """What was found in the texts of a split."""

    texts: Count
    empty: Count
    cut: Count  # longer than the encoder takes


@dataclass(frozen=True)
class Record:
    """Results of one run. Fields with a default are missing in older records."""

    benchmark: Name
    method: Name
    seed: int
    miniature: bool
    tasks: Count
    class_order: list[list[int]]
    accuracy_matrix: list[list[Percent | None]]
    average_accuracy: Percent
    forgetting: Change | None
    forgetting_by_definition: dict[str, Change | None]
    sparse_overlap: list[Annotated[float, Between(0, 1)] | None] | None
    average_sparse_overlap: Annotated[float, Between(0, 1)] | None
    zero_forgetting: Proof | None
    transfer: list[Transfer] | None
    storage: dict[str, Annotated[float, Between(0, 1e18)]] | None  # in bits
    seconds: Seconds
    device: Name
    versions: dict[str, str]
    data_digests: dict[str, str]
    config: RunConfig
    epochs: Count | None = None  # per task, all phases together
    accuracy_measured: list[list[bool | None]] | None = None  # false: carried over from the row above
    sample: bool = False  # whether a data set was here only in part
    setting: str = "task-incremental"
    task_identification: list[Percent] | None = None  # per task, where tests did not name it
    texts: dict[str, TextCounts] | None = None  # by split

    def __post_init__(self) -> None:
        size = len(self.accuracy_matrix)
        rows = {"class_order": self.class_order, "sparse_overlap": self.sparse_overlap, "transfer": self.transfer}
        wrong = [name for name, value in rows.items() if value is not None and len(value) != size]
        if any(len(row) != size for row in self.accuracy_matrix):
            wrong.append("accuracy_matrix")
        if wrong or not 0 < size == self.tasks:
            raise ValueError(f"{wrong[0] if wrong else 'accuracy_matrix'} does not have an entry for each task")
        if None in self.accuracy_matrix[-1]:
            raise ValueError("the last row of accuracy_matrix has a null")
        measured = self.accuracy_measured
        if measured is not None and [list(map(_there, row)) for row in measured] != [
            list(map(_there, row)) for row in self.accuracy_matrix
        ]:
            raise ValueError("accuracy_measured and accuracy_matrix have different entries")
        for name, value in self.config.settings.items():
            if not isinstance(value, str | int | float | None):
                raise ValueError(
                    f"setting {short(name)} is {short(value)}: a number, text, true, false or null was expected"
                )


def _there(entry: object) -> bool:
    return entry is not None


def typed_record(value: Any, where: str) -> Record:
    """Make a record from plain values; `where` names the file in an error."""
    return parse.typed(value, Record, where)


def read(file: Path) -> tuple[Record, dict[str, Any]]:
    """Read a record: typed, and as written, with fields that a later version may have added."""
    try:
        found: dict[str, Any] = parse.from_json(parse.read(file, parse.JSON.size, file.parent), str(file))
        return typed_record(found, str(file)), found
    except ParseError as error:
        raise RunError(f"{error} (delete the file to repeat the run)") from error
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
