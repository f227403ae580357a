"""Description of a stored task for users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exssnet.store.format.card import identity
from exssnet.store.format.manifest import Entry


@dataclass(frozen=True)
class StoredTask:
    """A task of a model directory."""

    name: str
    labels: tuple[str, ...]  # the classes, by name
    accuracy: float | None  # in percent, on the held-out part
    examples: int  # trained with
    lender: str | None
    overlap: float | None
    trained_weights: int
    date: str
    size: int  # bytes on disk
    digest: str
    card: Mapping[str, Any]  # the card as stored

    @classmethod
    def of(cls, entry: Entry, card: Mapping[str, Any]) -> StoredTask:
        """Make a task from an entry of the manifest and its card."""
        task = card["task"]
        return cls(
            entry.name, tuple(card["labels"]), card["accuracy"], card["examples"], task["lender"], task["overlap"],
            task["trained_weights"], card["date"], entry.card.size + entry.tensors.size, identity(card), card,
        )  # fmt: skip

    def __repr__(self) -> str:
        right = "" if self.accuracy is None else f", accuracy {self.accuracy:.1f} %"
        lender = "" if self.lender is None else f", lender {self.lender!r}"
        return f"StoredTask({self.name!r}, {len(self.labels)} classes{right}{lender}, digest {self.digest[:16]})"
