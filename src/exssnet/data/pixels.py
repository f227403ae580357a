"""Decode images to pixels, in this process or in helper processes. Imports no torch, so that helpers start quickly.

PIL releases the interpreter lock while it decodes. For large images that is most of the work, so threads help. For
small images two threads are slower than one, and only processes help.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from exssnet.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    Shape = tuple[int, int, int]

SMALL = 48 * 48  # pixels
WORTH = 2000  # number of small images whose decoding takes as long as starting a helper
MOST = 8


class Decode(Protocol):
    """Decode images of one shape to uint8 [N, C, H, W]; the file and the first row are for messages."""

    def __call__(self, encoded: list[bytes | None], shape: Shape, file: str, first: int) -> NDArray[np.uint8]: ...


def open_image(encoded: bytes | None, where: str, mode: str) -> Image:
    """Decode one image in a PIL mode (`L` or `RGB`)."""
    from PIL import Image

    if not encoded:
        raise DataError(f"{where}: no image bytes; the file is incomplete, download it again")
    try:
        return Image.open(BytesIO(encoded)).convert(mode)
    except Exception as error:  # damaged bytes raise any exception: OSError, SyntaxError, struct.error, ...
        raise DataError(f"{where}: the image cannot be decoded ({error}); download the file again") from error


def decode(encoded: list[bytes | None], shape: Shape, file: str, first: int) -> NDArray[np.uint8]:
    """Decode in this process."""
    channels, height, width = shape
    out = np.empty((len(encoded), *shape), np.uint8)
    for row, item in enumerate(encoded):
        where = f"{file}, row {first + row}"
        image = open_image(item, where, "L" if channels == 1 else "RGB")
        if image.size != (width, height):
            raise DataError(f"{where}: the image has {image.width}×{image.height} pixels, not {width}×{height}")
        out[row] = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)
    return out


@contextmanager
def decoder(images: int, shape: Shape) -> Iterator[tuple[Decode, int]]:
    """Choose how to decode a number of images, and in how many threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if shape[1] * shape[2] > SMALL:
        yield decode, cores
        return
    helpers = min(cores, MOST, images // WORTH)
    if helpers < 2 or not sys.executable:
        yield decode, 1
        return
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    started = [_start() for _ in range(helpers)]
    for helper in started:
        idle.put(helper)

    def by_a_helper(encoded: list[bytes | None], shape: Shape, file: str, first: int) -> NDArray[np.uint8]:
        helper = idle.get()
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            pickle.dump((encoded, shape, file, first), helper.stdin)
            helper.stdin.flush()
            answer: NDArray[np.uint8] | str = pickle.load(helper.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):  # it died or did not start
            return decode(encoded, shape, file, first)
        finally:
            idle.put(helper)
        if isinstance(answer, str):
            raise DataError(answer)
        return answer

    try:
        yield by_a_helper, helpers
    finally:
        for helper in started:
            helper.kill()
            with suppress(OSError):  # what a dead helper did not read
                helper.communicate()


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(place for place in sys.path if place)
    command = [sys.executable, "-P", "-c", "from exssnet.data.pixels import serve; serve()"]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def serve() -> None:
    """Serve requests until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: NDArray[np.uint8] | str
        try:
            answer = decode(*asked)
        except DataError as error:
            answer = str(error)
        pickle.dump(answer, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
