"""How much a user's data may be. What a file needs is known before it is read, and too much is refused in a line.

Only regular files are opened: a FIFO would be waited for without end, and a device has no end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from exssnet.errors import DataError, InputError, ParseError
from exssnet.io import parse

VARIABLE = "EXSSNET_MAX_GB"
USUAL = 32  # GB of examples in memory for one task
GB = 10**9
MOST_PACKED = 300  # times smaller in a file than in memory; one-hot columns, packed, are about 100 times smaller
MOST_CLASSES = 10**6
MOST_GAPS = 100  # unused numbers for each class that occurs


def most_bytes() -> int:
    """For one task's examples, in a file and in memory."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return USUAL * GB
    try:
        return int(float(chosen) * GB)
    except (ValueError, OverflowError):
        raise InputError(f"{VARIABLE} is '{chosen}': give a number of gigabytes, for example {USUAL}") from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A user's file, to be read: regular, and not too large."""
    with ExitStack() as stack:
        try:
            file, _ = stack.enter_context(parse.opened(path, most_bytes(), None))
        except ParseError as error:
            more = f"; {VARIABLE} allows more" if "at most" in str(error) else ""
            raise DataError(f"{error}{more}") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        yield file


def require_readable(path: Path) -> None:
    """For files that a library opens by their path."""
    with opened(path):
        pass


def require_memory(path: Path, needed: int) -> None:
    """Refuse examples that would take too much memory."""
    if needed > most_bytes():
        raise DataError(f"{path}: would take {needed / GB:,.1f} GB of memory; {VARIABLE} allows more than {USUAL}")


def require_room(path: Path, needed: int) -> None:
    """Refuse a file whose content would take too much memory, or more than its size explains."""
    require_memory(path, needed)
    stored = max(path.stat().st_size, 1)
    if needed > GB and needed > MOST_PACKED * stored and not os.environ.get(VARIABLE):
        raise DataError(
            f"{path}: {stored:,} bytes would unpack to {needed / GB:,.1f} GB, more than data packs; "
            f"save it without compression, or set {VARIABLE}"
        )


def require_numbered(highest: int, distinct: int) -> None:
    """Refuse labels whose numbers would make classes that nobody meant: 0, 1 and 1,000,000,000."""
    if highest >= MOST_GAPS * max(distinct, 10):
        raise InputError(
            f"labels go up to {highest:,}, but only {distinct:,} different ones occur: "
            f"number the classes from 0 to {distinct - 1:,}, or say how many there are (classes)"
        )
