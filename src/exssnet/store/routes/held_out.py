"""The held-out examples of a directory's tasks, which measure routing.

A directory has no examples. Those of tasks that this process learned stay in memory; those of other tasks are read
again from their files, if these exist and have the same digest. Both are limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from exssnet.data.files.labelled import Labelled, hold_out, read_labelled
from exssnet.data.files.origin import Recorded, record
from exssnet.errors import DataError
from exssnet.io.typed import Between, typed

MOST_ROWS = 200  # per task
KEPT_BYTES = 64 * 10**6  # in memory, of all tasks
READ_BYTES = 128 * 10**6  # of files that are read again for one task


@dataclass(frozen=True)
class Source:
    """The files of a task's examples, and which examples were held out."""

    data: Recorded
    labels: Recorded | None  # the second file of a .npy
    held_out: Annotated[float, Between(0, 1)]  # the fraction held out


def source_of(found: Labelled, held_out: float) -> dict[str, Any] | None:
    """The files of labelled examples, for the card; None for examples in memory."""
    data = None if found.path is None else record(found.path)
    if data is None:
        return None
    labels = None if found.second is None else record(found.second)
    if found.second is not None and labels is None:
        return None
    return asdict(Source(data, labels, held_out))


class HeldOut:
    """Finds the held-out inputs of tasks by their cards."""

    def __init__(self) -> None:
        self._stored: dict[str, Tensor] = {}  # by the digest of a task's card, the oldest first

    def keep(self, digest: str, inputs: Tensor) -> None:
        """Store the raw held-out inputs of a task that was just learned."""
        self._stored[digest] = inputs[spread(len(inputs), MOST_ROWS)].clone()
        while len(self._stored) > 1 and sum(map(_bytes, self._stored.values())) > KEPT_BYTES:
            self._stored.pop(next(iter(self._stored)))

    def reader(self, seed: int) -> Reading:
        """Make a reader for one change, of up to `READ_BYTES`."""
        return Reading(self._stored, seed)


class Reading:
    """Reads files of earlier tasks up to a limit."""

    def __init__(self, stored: Mapping[str, Tensor], seed: int) -> None:
        self._stored, self._seed, self._left = stored, seed, READ_BYTES

    def __call__(self, card: Mapping[str, Any], rows: int) -> Tensor:
        """Read raw held-out inputs of a task, or raise a DataError that says why there are none."""
        if not card["held_out"]:
            raise DataError("nothing was held out")
        stored = self._stored.get(card["digest"])
        if stored is not None:
            return stored[spread(len(stored), rows)]
        if card.get("source") is None:
            raise DataError("its examples were given in memory, to another process")
        source = typed(card["source"], Source, "the card's source")
        size = source.data.size + (source.labels.size if source.labels else 0)
        if size > self._left:
            raise DataError(f"{source.data.path} has {size:,} bytes, of which {self._left:,} may be read again")
        self._left -= size
        return _read(card, source, rows, self._seed)


def _read(card: Mapping[str, Any], source: Source, rows: int, seed: int) -> Tensor:
    def chosen(labels: Tensor) -> Tensor:
        held = hold_out(labels, source.held_out, seed)[1]
        return held[spread(len(held), rows)]

    recipe = card["recipe"]
    path = source.data.require_unchanged()
    second: Path | None = source.labels.require_unchanged() if source.labels else None
    found = read_labelled(
        path, tuple(recipe["shape"]), card.get("label"), second, list(card["labels"]), recipe, chosen
    )  # fmt: skip
    return found.inputs


def spread(count: int, most: int) -> Tensor:
    """Select evenly spaced rows, because files are often sorted by class."""
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).round().long()


def _bytes(inputs: Tensor) -> int:
    return inputs.numel() * inputs.element_size()
