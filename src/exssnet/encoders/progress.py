"""Who is told how far an encoding is: a command that shows it, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], None]  # what is encoded, texts that are there, all of them

_listeners: list[Listener] = []  # of the whole process: runs in threads are told of together


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Tell this listener of encodings inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(what: str, done: int, total: int) -> None:
    """Tell the listeners how many texts of a data set are encoded."""
    for listener in list(_listeners):
        listener(what, done, total)
