"""Labels as a user writes them (text, numbers, folder names) to class names in a settled order."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exssnet.errors import DataError, InputError

Where = Callable[[int], str]  # where the example of a row lies, for messages

SHOWN = 10  # classes named in a message


def label_names(written: Sequence[Any], own: list[str] | None, known: Sequence[str] | None, where: Where) -> list[str]:
    """The class name of every example. `own` are the file's names for 0, 1, ...; `known` are kept as they are."""
    if own is not None:
        return [_own_name(value, own, where(row)) for row, value in enumerate(written)]
    names = [_name(value, row, where) for row, value in enumerate(written)]
    short = _without_fractions(set(names) - set(known or ()))
    for row, name in enumerate(names):
        if short.get(name, name) is None:
            raise DataError(f"{where(row)}: label {name} is not a whole number; give names or whole numbers")
    return [short.get(name) or name for name in names]


def settle(
    names: Sequence[str], own: list[str] | None, known: Sequence[str] | None, where: Where, path: Path
) -> tuple[Tensor, list[str]]:
    """Labels int64 [N] and the classes they number: the known ones, or else those of the file."""
    for row, name in enumerate(names):
        if not name.isprintable():  # a card could not hold it, or a terminal not show it
            raise DataError(f"{where(row)}: the label {name!r} has signs that cannot be printed; give it another name")
    if twins := alike(names):
        raise DataError(f"{path}: the labels {twins[0]} and {twins[1]} print alike; give one of them another name")
    classes = _classes(names, own, path) if known is None else list(known)
    number = {name: at for at, name in enumerate(classes)}
    for row, name in enumerate(names):
        if name not in number:
            listed = ", ".join(classes[:SHOWN]) + (", ..." if len(classes) > SHOWN else "")
            raise DataError(f"{where(row)}: label '{name}' is none of the learned classes {listed}")
    return torch.tensor([number[name] for name in names], dtype=torch.int64), classes


def class_names(classes: Sequence[Any]) -> list[str]:
    """The names that a caller gives to classes 0, 1, ..., each its own."""
    for name in classes:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"{name!r} cannot be a class's name: give text that can be printed")
    if len(set(classes)) < len(classes):
        twice = Counter(classes).most_common(1)[0][0]
        raise InputError(f"the class '{twice}' is named twice: give every class a name of its own")
    if twins := alike(classes):
        raise InputError(f"the classes {twins[0]} and {twins[1]} print alike: give one of them another name")
    return list(classes)


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are the same text in two encodings of Unicode, as `ascii` tells them apart, if there are any."""
    seen: dict[str, str] = {}
    for name in dict.fromkeys(names):
        other = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            return ascii(other), ascii(name)
    return None


def plain_number(text: str) -> float:
    """A decimal number in ASCII, with spaces around it or not. `1_0` and `１０` are text, whatever Python thinks."""
    if "_" in text or not text.isascii():  # all that float() takes beyond it
        raise ValueError(text)
    return float(text)


def _classes(names: Sequence[str], own: list[str] | None, path: Path) -> list[str]:
    """The names that occur, in the order of the file's own list; without one numbers by size, text by name."""
    distinct = set(names)
    if len(distinct) < 2:
        raise DataError(f"{path}: all labels are '{names[0]}'; a task needs at least two classes")
    if own is not None:
        return [name for name in own if name in distinct]
    try:
        return sorted(distinct, key=_by_size)
    except ValueError:
        return sorted(distinct)


def _by_size(name: str) -> tuple[int, str]:
    plain_number(name)
    return int(name), name


def _own_name(value: Any, own: list[str], where: str) -> str:
    if isinstance(value, str) and value in own:
        return value
    if not isinstance(value, int) or not 0 <= value < len(own):
        raise DataError(f"{where}: label {value!r} is not in 0 to {len(own) - 1}, which the file has names for")
    return own[value]


def _name(value: Any, row: int, where: Where) -> str:
    """One label as text; floats are left with their fraction."""
    if isinstance(value, str | int | float):
        text = str(value).strip()
        if text:
            return text
    if value is None or value == "":
        raise DataError(f"{where(row)}: the label is empty; fill it in or remove the row")
    raise DataError(f"{where(row)}: the label {value!r} is a {type(value).__name__}; give text or whole numbers")


def _without_fractions(names: set[str]) -> dict[str, str | None]:
    """Where all names are numbers, `2.0` is called `2`, as elsewhere the same class may be; None: 2.5."""
    short: dict[str, str | None] = {}
    for name in names:
        try:
            number = plain_number(name)
        except ValueError:
            return {}
        if not number.is_integer():  # also NaN and infinity
            short[name] = None
        elif not name.lstrip("+-").isdecimal():
            short[name] = str(int(number))
    return short
