"""Work beside the main line of a captured step.

The gradient of a weight is asked for only at the end of the backward pass, and one layer's is too little work to fill a
GPU. So, while a step is captured, it goes to a second stream, and the graph has two lines that run at the same time.
Not captured, everything stays in one line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Forked(threading.local):
    """The second stream of every main line that this thread captures."""

    def __init__(self) -> None:
        self.streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


_forked = _Forked()


@contextmanager
def beside(*read: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Launch beside the main line what reads these tensors; the result goes through the function that is given."""
    if not read[0].is_cuda or not torch.cuda.is_current_stream_capturing():
        yield lambda result: result
        return
    main = torch.cuda.current_stream()
    if main not in _forked.streams:
        _forked.streams[main] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    other = _forked.streams[main]
    other.wait_stream(main)

    def kept(result: Tensor) -> Tensor:
        result.record_stream(main)
        return result

    with torch.cuda.stream(other):
        yield kept
    for tensor in read:
        tensor.record_stream(other)  # its memory must not be given to the main line meanwhile


def join() -> None:
    """Let the main line wait for what was launched beside it."""
    if not _forked.streams or not torch.cuda.is_current_stream_capturing():
        return
    main = torch.cuda.current_stream()
    if main in _forked.streams:
        main.wait_stream(_forked.streams.pop(main))
