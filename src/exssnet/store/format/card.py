"""A task's card: its description as JSON. A reader checks the fields it needs and ignores unknown ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Annotated, Any

from exssnet.core.network import LearnedTask
from exssnet.core.proof import combined_digest
from exssnet.data.limits import MOST_CLASSES
from exssnet.errors import ParseError, StoreError
from exssnet.io.parse import MEBIBYTE, Between, Length, Limits, from_json, typed
from exssnet.store.format.base_file import MOST_NUMBERS
from exssnet.store.format.probe import Probe
from exssnet.store.routes.measured import Measured

Card = dict[str, Any]

ANSWERS = ("labels", "recipe", "scaling")  # fields that a prediction depends on, besides the tensors
LIMITS = Limits(size=64 * MEBIBYTE, values=4 * MOST_CLASSES)

Count = Annotated[int, Between(0, 2**48)]
Word = Annotated[str, Length(0, 100)]
Name = Annotated[str, Length(1, 1000)]
Deviation = Annotated[float, Between(1e-45, 1e300)]


@dataclass(frozen=True)
class OfTask:
    """The network's description of a task."""

    name: Name
    classes: Annotated[int, Between(1, MOST_CLASSES)]
    lender: Name | None
    overlap: Annotated[float, Between(0, 1)] | None
    trained_weights: Count
    digests: dict[str, str]
    kept: str


@dataclass(frozen=True)
class Recipe:
    """How inputs are read."""

    kind: Word
    shape: Annotated[tuple[Annotated[int, Between(1, MOST_NUMBERS)], ...], Length(1, 16)]
    dtype: Word = ""  # of arrays
    columns: tuple[str, ...] = ()  # of tables

    def __post_init__(self) -> None:
        if prod(self.shape) > MOST_NUMBERS:
            raise ValueError(f"an input has more than {MOST_NUMBERS:,} numbers")
        if self.kind == "table" and self.shape != (len(self.columns),):
            raise ValueError(f"a table of shape {list(self.shape)} has {len(self.columns)} columns")
        if self.kind not in ("table", "image") and not self.dtype:
            raise ValueError("dtype is missing")


@dataclass(frozen=True)
class Scaling:
    """`(x · scale - mean) / std`; empty for indices."""

    mean: tuple[float, ...] = ()
    std: tuple[Deviation, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True)
class Known:
    """Required fields of a card and their types; `routing` and `source` are checked when they are used."""

    task: OfTask
    labels: tuple[str, ...]
    recipe: Recipe
    scaling: Scaling | None
    accuracy: Annotated[float, Between(0, 100)] | None
    examples: Count
    held_out: Count
    date: Word
    digest: Word
    label: str | None = None
    probe: Probe | None = None

    def __post_init__(self) -> None:
        if len(self.labels) != self.task.classes:
            raise ValueError(f"{len(self.labels)} labels for {self.task.classes} classes")
        if self.scaling and not len(self.scaling.mean) == len(self.scaling.std) in (0, 1, self.recipe.shape[0]):
            raise ValueError(
                f"a scaling with {len(self.scaling.mean)} means and {len(self.scaling.std)} deviations for inputs of "
                f"shape {list(self.recipe.shape)}"
            )


def parse(content: bytes, where: str) -> Card:
    """Parse a card."""
    try:
        card: Card = from_json(content, where, LIMITS)
        known = typed(card, Known, f"{where} is not the card of a task")
    except ParseError as error:
        raise StoreError(str(error)) from error
    if card["scaling"] and not (known.scaling and known.scaling.mean):
        raise StoreError(f"{where} is not the card of a task: its scaling has no mean")
    return card


def content(card: Mapping[str, Any]) -> bytes:
    """Write a card."""
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def with_task(card: Mapping[str, Any], learned: LearnedTask) -> Card:
    """The card with the network's current description of the task."""
    known = {
        "name": learned.name, "classes": learned.classes, "lender": learned.lender, "overlap": learned.overlap,
        "trained_weights": learned.trained_weights, "digests": learned.digests, "kept": learned.kept,
    }  # fmt: skip
    return {"task": card.get("task", {}) | known} | {name: value for name, value in card.items() if name != "task"}


def renamed(card: Mapping[str, Any], task: str, name: str) -> Card:
    """The card after a task was renamed."""
    own = card["task"] | {key: name for key in ("name", "lender") if card["task"][key] == task}
    measured = Measured.of_card(card)
    routing = {} if measured is None else {"routing": measured.renamed(task, name).json()}
    return dict(card) | {"task": own} | routing


def without(card: Mapping[str, Any], task: str) -> Card:
    """The card after another task was removed, whose name may be used again."""
    lender = card["task"]["lender"]
    own = card["task"] | {"lender": None if lender == task else lender}
    measured = Measured.of_card(card)
    left = None if measured is None else measured.without(task)
    return dict(card) | {"task": own} | ({} if measured is None else {"routing": left and left.json()})


def distinct(labels: Sequence[str]) -> list[str]:
    """Distinct names of classes, even if a card has one twice: the second `cat` is `cat (2)`."""
    if len(set(labels)) == len(labels):
        return list(labels)
    found: list[str] = []
    for label in labels:
        name, times = label, 1
        while name in found:
            times += 1
            name = f"{label} ({times})"
        found.append(name)
    return found


def of_network(card: Mapping[str, Any]) -> Card:
    """The fields of `task` that this version knows."""
    return {field.name: card["task"][field.name] for field in fields(OfTask)}


def identity(card: Mapping[str, Any]) -> str:
    """Digest of everything that predictions depend on: tensors, labels, and how inputs are read and scaled."""
    words = {name: json.dumps(card[name], sort_keys=True, ensure_ascii=False) for name in ANSWERS}
    return combined_digest(
        card["task"]["digests"]
        | {f"card {name}": hashlib.sha256(text.encode()).hexdigest() for name, text in words.items()}
    )
