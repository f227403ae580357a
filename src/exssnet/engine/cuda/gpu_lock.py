"""Runs that share a GPU take turns with it from Python; what is captured needs no turn.

Seeding, capturing, compiling and single operations of several threads would disturb each other: a graph must not be
captured while another thread reseeds a generator or lets a library set itself up. So a thread does all of that while it
has the turn, and lends the turn to the others while its graphs are replayed. A thread that never asked for the turn, as
in a run alone, is not held up by any of this.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_turn = threading.Lock()
_mine = threading.local()


def ask_for_connections() -> None:
    """Before CUDA starts: have as many connections to a GPU as there can be, unless the user says how many.

    Streams share them, and by default there are eight: what one run launches then waits for what another has launched.
    """
    os.environ.setdefault(CONNECTIONS, "32")


@contextmanager
def taking_turns() -> Iterator[None]:
    """Have the turn, but for what is done under `lending_the_turn`."""
    with _turn:
        _mine.held = True
        try:
            yield
        finally:
            _mine.held = False


@contextmanager
def lending_the_turn() -> Iterator[None]:
    """Let others work while the GPU is busy with what this thread has launched."""
    if not getattr(_mine, "held", False):
        yield
        return
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()
