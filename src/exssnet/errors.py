"""The one family of exceptions: every message names the value, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


def printable(text: str) -> str:
    """On one line, with what a terminal would obey instead of showing it written as `repr` writes it."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


class ExssnetError(Exception):
    """Base of everything this package raises on purpose; the command line prints it as one line.

    Whatever names, labels and cells of a user's files a message quotes, it can be shown.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(ExssnetError, ValueError):
    """A value the caller passed cannot be used."""


class DataError(ExssnetError):
    """A data set is missing, unreadable or not what it should be."""


class ParseError(ExssnetError):
    """A file does not hold what it should."""


class RunError(ExssnetError):
    """A run folder cannot be written, resumed or read."""


class StoreError(ExssnetError):
    """A model directory cannot be read or written."""


class ForgettingError(ExssnetError):
    """A task that was promised to stay as it was learned has changed."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not in a registry: offers the nearest names, or lists all."""
    known = sorted(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    offer = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
    return InputError(f"unknown {kind} '{name}': {offer}")
