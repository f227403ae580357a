"""Output of commands: text that any stream can show, errors in one line, and exit codes."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ENOSPC, EPIPE
from typing import TYPE_CHECKING, Any, NoReturn

from exssnet.errors import ExssnetError, printable

if TYPE_CHECKING:
    from rich.console import Console

REFUSED, UNWRITTEN, STOPPED = 2, 3, 130  # exit codes, documented in docs/reference/command-line.md
TRACEBACK = "EXSSNET_TRACEBACK"
ERRORS = "exssnet"  # the codec error handler for characters that a stream cannot show
ASCII = {"–": "-", "—": "-", "±": "+-", "…": "...", "×": "x", "·": "*"}


class Stopped(Exception):
    """The user stopped a command; the message says what was saved."""


class OutputError(Exception):
    """Standard output cannot be written; `saved` says what the command has stored before."""

    def __init__(self, error: OSError, saved: str = "") -> None:
        super().__init__(error.strerror or str(error))
        self.error, self.saved = error, saved


class _Output(io.TextIOWrapper):
    """Standard output whose errors are distinguished from those of other files."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputError(error) from error


def tell(message: str) -> None:
    """Print one line on standard error. If that fails, only the exit code remains."""
    with suppress(OSError, ValueError):
        print(f"exssnet: {printable(message)}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print one line on standard output; control characters in names are escaped."""
    print(printable(text))


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON on standard output, in ASCII if the encoding is not Unicode; control characters are escaped."""
    unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=indent, ensure_ascii=not unicode)
    print("".join(sign if sign.isprintable() or sign == "\n" else json.dumps(sign)[1:-1] for sign in text))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under their headings, right-aligned where a heading starts with `>`; nothing is wrapped or cut."""
    from rich.cells import cell_len

    right = [heading.startswith(">") for heading in headings]
    shown = [[printable(cell) for cell in row] for row in ([h.removeprefix(">") for h in headings], *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = []
        for cell, width, to_right in zip(row, widths, right, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if to_right else cell + space)
        print("  ".join(cells).rstrip())


def rich_console(**options: Any) -> Console:
    """Make a console that does not interpret markup in names."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


@contextmanager
def stored(what: str) -> Iterator[None]:
    """Print the result of a stored change; if that fails, the error message says that it is stored."""
    try:
        yield
        sys.stdout.flush()
    except OutputError as error:
        raise OutputError(error.error, what) from error


@contextmanager
def stoppable(saved: Callable[[], str]) -> Iterator[None]:
    """If the user stops the block, say what was saved and how to continue."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(saved()) from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Run a program; errors of ours and of the system become one line and an exit code."""
    _prepare_streams()
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ExssnetError as error:
        _exit(REFUSED, str(error))
    except OutputError as error:
        if error.saved:
            _exit(UNWRITTEN, f"{error.saved}, but the output could not be written: {error}")
        closed = error.error.errno == EPIPE  # the reader has read enough
        _exit(UNWRITTEN, "" if closed else f"the output could not be written: {error}")
    except OSError as error:
        if os.environ.get(TRACEBACK) or (error.filename is None and error.errno != ENOSPC):
            raise
        file = f"{error.filename}: " if error.filename else ""
        _exit(REFUSED, f"{file}{error.strerror} ({TRACEBACK}=1 prints the traceback)")
    except (MemoryError, RuntimeError) as error:
        # PyTorch's errors on a CPU and on a GPU
        full = "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError"
        if os.environ.get(TRACEBACK) or not (full or isinstance(error, MemoryError)):
            raise
        _exit(REFUSED, f"not enough memory ({' '.join(str(error).split())})")
    except (KeyboardInterrupt, Stopped) as error:
        _exit(STOPPED, "; ".join(["stopped", *map(str, error.args)]))


def _exit(code: int, message: str) -> NoReturn:
    if message:
        tell(message)
    try:
        sys.stdout.flush()
    except OutputError:  # discard it: it would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _prepare_streams() -> None:
    """Make the standard streams usable if they are closed or cannot show every character."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: otherwise the next file opened would receive the output
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None:  # open for reading only, so writing fails
        sys.stdout = _Output(os.fdopen(1, "wb", closefd=False), encoding="utf-8", errors=ERRORS)
    elif isinstance(sys.stdout, io.TextIOWrapper) and not isinstance(sys.stdout, _Output):
        encoding, by_line = sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = _Output(sys.stdout.detach(), encoding=encoding, errors=ERRORS, line_buffering=by_line)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Write characters that a stream cannot show in ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    return "".join(ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs), error.end


codecs.register_error(ERRORS, _plainly)
