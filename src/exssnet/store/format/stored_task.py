"""What users are told of a stored task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exssnet.store.format.card import identity
from exssnet.store.format.manifest import Entry


@dataclass(frozen=True)
class StoredTask:
    """What a directory knows of a task."""

    name: str
    labels: tuple[str, ...]  # the classes, by name
    accuracy: float | None  # in percent, on the part that was held out
    examples: int  # it was trained with
    lender: str | None
    overlap: float | None
    trained_weights: int
    date: str
    size: int  # bytes on disk
    digest: str
    card: Mapping[str, Any]  # all of it, as stored

    @classmethod
    def of(cls, entry: Entry, card: Mapping[str, Any]) -> StoredTask:
        """The task of an entry in the manifest, with its card."""
        task = card["task"]
        return cls(
            entry.name, tuple(card["labels"]), card["accuracy"], card["examples"], task["lender"], task["overlap"],
            task["trained_weights"], card["date"], entry.card.size + entry.tensors.size, identity(card), card,
        )  # fmt: skip

    def __repr__(self) -> str:
        right = "" if self.accuracy is None else f", {self.accuracy:.1f} % right"
        lender = "" if self.lender is None else f", lender {self.lender!r}"
        return f"StoredTask({self.name!r}, {len(self.labels)} classes{right}{lender}, digest {self.digest[:16]})"
