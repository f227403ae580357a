"""The two streams that a step is captured on.

What a step computes of memory that stays, such as the weights under a mask, needs nothing of the batch. The gradient
of a weight is needed only at the end of the backward pass, and one layer's is too little work to fill a GPU. So, while
a step is captured, both go to a second stream, and the graph has two branches that run at the same time. Not captured,
everything stays on one stream.

What the second stream reads is held until the streams join, so that nobody writes to it or gets its memory. A weight
that is used twice in a step has two gradients that are added up before that: its second one waits for the first, on
the main stream.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_capturing = threading.Lock()  # one capture at a time: they share the streams below


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The main stream (0) or the second stream (1) that a step is captured on.

    PyTorch hands out the same 32 streams again and again. Streams for every capture would soon be those on which other
    runs replay their steps meanwhile.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Second:
    """What a capture has launched on the second stream since the streams joined.

    One for all threads: a backward pass runs in a thread of its own, and one thread captures at a time.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.begun: torch.cuda.Event | None = None
        self.held: list[Tensor] = []
        self.weights: set[int] = set()


_second = _Second()


@contextmanager
def main_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The stream on which steps are captured, while nobody else captures."""
    with _capturing:
        _second.forget()  # what a capture that failed may have left
        yield _stream(device, 0)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch on a stream, after what was launched before and before what comes after."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch into the graph.

    cuBLAS has one working memory for each stream. That of this stream would be part of every graph, and graphs that are
    replayed at the same time would write over each other's sums; so a graph gets one of its own.

    The garbage collector waits: what it finds may be an old graph, and to give its memory back would end the capture.
    """
    torch._C._cuda_clearCublasWorkspaces()
    collecting = gc.isenabled()
    before = torch.cuda.current_stream() if torch.cuda.is_available() else None
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        if before is not None:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own
        raise
    finally:
        if collecting:
            gc.enable()
        _second.begun = None  # it is of this graph
        torch._C._cuda_clearCublasWorkspaces()


def begin() -> None:
    """Say that a step begins here, on a GPU."""
    if torch.cuda.is_current_stream_capturing():
        _second.begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        _second.begun.record()


@contextmanager
def early() -> Iterator[None]:
    """Launch what could run since the step began: it reads and writes memory that stays, and nothing of this step.

    Only once in a step, since what comes after may read what was written.
    """
    if _second.begun is None or not torch.cuda.is_current_stream_capturing():
        yield
        return
    begun, _second.begun = _second.begun, None
    main = torch.cuda.current_stream()
    other = _stream(main.device, 1)
    other.wait_event(begun)
    with torch.cuda.stream(other):
        yield
    main.wait_stream(other)


@contextmanager
def concurrently(weight: Tensor, *read: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Launch on the second stream what makes a weight's gradient from these tensors.

    The result goes through the function that is given.
    """
    if not weight.is_cuda or not torch.cuda.is_current_stream_capturing():
        yield lambda result: result
        return
    if weight.data_ptr() in _second.weights:
        join()
        yield lambda result: result
        return
    main, other = torch.cuda.current_stream(), _stream(weight.device, 1)
    other.wait_stream(main)
    _second.held += read
    _second.weights.add(weight.data_ptr())

    def kept(result: Tensor) -> Tensor:
        result.record_stream(main)
        return result

    with torch.cuda.stream(other):
        yield kept
    for tensor in read:
        tensor.record_stream(other)  # its memory must not be given to the main stream meanwhile


def join() -> None:
    """Let the main stream wait for the second one."""
    if _second.weights and torch.cuda.is_current_stream_capturing():
        main = torch.cuda.current_stream()
        main.wait_stream(_stream(main.device, 1))
        _second.forget()
