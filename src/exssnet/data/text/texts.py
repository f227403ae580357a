"""Labelled texts before they are encoded, and how a sample of them is drawn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from exssnet.data.streams import rows_by_class
from exssnet.encoders.base import Text
from exssnet.errors import InputError
from exssnet.randomness import generator


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts, or pairs of texts, with their labels. `of`: how many rows the whole data set has, if this is a part."""

    texts: Sequence[Text]
    labels: Tensor  # int64 [N], local to the task
    of: int | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over texts and labels in their order."""
        return hashlib.sha256(json.dumps([list(self.texts), self.labels.tolist()]).encode()).hexdigest()

    @cached_property
    def empty(self) -> int:
        """Texts without a sign that is not a space; of pairs those where both are."""
        return sum(not "".join(text).strip() for text in self.texts)

    def select(self, rows: Tensor) -> Texts:
        """Some of them, in the order of the rows."""
        return Texts([self.texts[row] for row in rows.tolist()], self.labels[rows], self.of)


@dataclass(frozen=True)
class Sample:
    """What is taken of each class. The draw is part of the benchmark: no run's seed moves it.

    Training comes first: validation gets what is left, but at least its share. So a class of a small data set is
    divided as `validation` says, and one of a large data set gives `most` rows to either.
    """

    most: int | None = None  # training rows of a class
    most_validation: int | None = None
    validation: float = 0.0  # share of a class; 0: none is held out
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise InputError(f"validation is {self.validation}: give a fraction, at least 0 and below 1")
        if self.most is not None and self.most < 1:
            raise InputError(f"sample is {self.most}: give at least 1 row a class, or leave it out for all")

    def cut(self, texts: Texts, classes: int, name: str) -> tuple[Texts, Texts | None]:
        """Training and validation part, each with the classes in turn, so that a smaller sample begins a larger."""
        kept: list[Tensor] = []
        held: list[Tensor] = []
        for label, rows in enumerate(rows_by_class(texts.labels, classes)):
            drawn = rows[torch.randperm(len(rows), generator=generator(self.seed, "text sample", name, label))]
            aside = self.held(len(rows))
            rest = len(rows) - aside
            train = rest if self.most is None else min(rest, self.most)
            kept.append(drawn[aside:].flip(0)[:train])  # from the other end than validation
            held.append(drawn[:aside])
        if not self.validation:
            return texts.select(_in_turn(kept)), None
        return texts.select(_in_turn(kept)), texts.select(_in_turn(held))

    def held(self, rows: int) -> int:
        """Number of validation rows of a class with this number of rows."""
        if not self.validation or rows < 2:
            return 0
        share = round(self.validation * rows)
        wanted = share if self.most is None else max(share, rows - self.most)
        most = self.most_validation if self.most_validation is not None else rows
        return min(max(wanted, 1), most, rows - 1)


def some(texts: Texts, most: int, name: str) -> Texts:
    """At most this number of rows, always the same, in the data set's order."""
    if len(texts) <= most:
        return texts
    chosen = torch.randperm(len(texts), generator=generator(0, "text rows", name))[:most]
    return texts.select(chosen.sort().values)


def _in_turn(parts: list[Tensor]) -> Tensor:
    """The first of every part, then the second of every part, and so on."""
    if not parts:
        return torch.zeros(0, dtype=torch.int64)
    ranks = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(parts)[ranks.argsort(stable=True)]
