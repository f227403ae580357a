"""Map a user's labels (text, numbers, folder names) to class names in a fixed order."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exssnet.errors import DataError, InputError

Where = Callable[[int], str]  # location of a row, for messages

SHOWN = 10  # classes named in a message


def label_names(written: Sequence[Any], own: list[str] | None, known: Sequence[str] | None, where: Where) -> list[str]:
    """The class name of every example. `own` are the file's names of 0, 1, ...; `known` names are not changed."""
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
    """Labels int64 [N] and their classes: the known ones, or those of the file."""
    for row, name in enumerate(names):
        if not name.isprintable():  # a card cannot store it, or a terminal cannot show it
            raise DataError(f"{where(row)}: the label {name!r} has characters that cannot be printed; rename it")
    if twins := alike(names):
        raise DataError(f"{path}: the labels {twins[0]} and {twins[1]} look equal; rename one of them")
    classes = _classes(names, own, path) if known is None else list(known)
    number = {name: at for at, name in enumerate(classes)}
    for row, name in enumerate(names):
        if name not in number:
            listed = ", ".join(classes[:SHOWN]) + (", ..." if len(classes) > SHOWN else "")
            raise DataError(f"{where(row)}: label '{name}' is not one of the learned classes {listed}")
    return torch.tensor([number[name] for name in names], dtype=torch.int64), classes


def class_names(classes: Sequence[Any]) -> list[str]:
    """Check the names that a caller gives to classes 0, 1, ..."""
    for name in classes:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"{name!r} cannot be the name of a class: give text that can be printed")
    if len(set(classes)) < len(classes):
        twice = Counter(classes).most_common(1)[0][0]
        raise InputError(f"the class '{twice}' is given twice: give every class another name")
    if twins := alike(classes):
        raise InputError(f"the classes {twins[0]} and {twins[1]} look equal: rename one of them")
    return list(classes)


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two names that are equal after Unicode normalization, as written by `ascii`."""
    seen: dict[str, str] = {}
    for name in dict.fromkeys(names):
        other = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            return ascii(other), ascii(name)
    return None


def plain_number(text: str) -> float:
    """Whether text is a decimal number in ASCII, with or without spaces around it. `1_0` and `１０` are text."""
    if "_" in text or not text.isascii():  # everything else that float() accepts
        raise ValueError(text)
    return float(text)


def _classes(names: Sequence[str], own: list[str] | None, path: Path) -> list[str]:
    """Names that occur, in the order of the file's list; without one numbers by value, text by name."""
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
        raise DataError(f"{where}: label {value!r} is not in 0 to {len(own) - 1}, for which the file has names")
    return own[value]


def _name(value: Any, row: int, where: Where) -> str:
    """Convert one label to text; floats keep their fraction."""
    if isinstance(value, str | int | float):
        text = str(value).strip()
        if text:
            return text
    if value is None or value == "":
        raise DataError(f"{where(row)}: the label is empty; fill it in or remove the row")
    raise DataError(f"{where(row)}: the label {value!r} is a {type(value).__name__}; give text or whole numbers")


def _without_fractions(names: set[str]) -> dict[str, str | None]:
    """If all names are numbers, rename `2.0` to `2`, which is the same class elsewhere; None for 2.5."""
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
