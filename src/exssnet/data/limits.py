"""Limits of a user's data. The memory that a file needs is known before it is read, and too much is refused.

Only regular files are opened: reading a FIFO or a device may never end.
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
MOST_PACKED = 300  # maximum ratio of memory to file size; compressed one-hot columns reach about 100
MOST_CLASSES = 10**6
MOST_GAPS = 100  # maximum number of unused labels per class that occurs


def most_bytes() -> int:
    """Maximum bytes of one task's examples, in a file and in memory."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return USUAL * GB
    try:
        return int(float(chosen) * GB)
    except (ValueError, OverflowError):
        raise InputError(f"{VARIABLE} is '{chosen}': give a number of gigabytes, for example {USUAL}") from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Check that a user's file is regular and not too large."""
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
    """Refuse FIFOs and devices, for files that a library opens by path."""
    with opened(path):
        pass


def require_memory(path: Path, needed: int) -> None:
    """Refuse examples that need too much memory."""
    if needed > most_bytes():
        raise DataError(f"{path}: would take {needed / GB:,.1f} GB of memory; {VARIABLE} allows more than {USUAL}")


def require_room(path: Path, needed: int) -> None:
    """Refuse a file whose content needs too much memory, or implausibly much for its size."""
    require_memory(path, needed)
    stored = max(path.stat().st_size, 1)
    if needed > GB and needed > MOST_PACKED * stored and not os.environ.get(VARIABLE):
        raise DataError(
            f"{path}: {stored:,} bytes would unpack to {needed / GB:,.1f} GB, which is implausible; "
            f"save it without compression, or set {VARIABLE}"
        )


def require_numbered(highest: int, distinct: int) -> None:
    """Refuse labels such as 0, 1 and 1,000,000,000, which would make unintended classes."""
    if highest >= MOST_GAPS * max(distinct, 10):
        raise InputError(
            f"labels go up to {highest:,}, but only {distinct:,} different ones occur: "
            f"number the classes from 0 to {distinct - 1:,}, or give `classes`"
        )
