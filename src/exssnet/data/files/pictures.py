"""Convert a user's images of any size and mode to the input shape of a network."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exssnet.data import limits
from exssnet.data.pixels import MOST, SMALL
from exssnet.errors import DataError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})
# images that cannot be read: ignoring them would train on part of the user's data
FOREIGN = frozenset({".heic", ".heif", ".avif", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".psd"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # not EPS: PIL would start Ghostscript
READABLE = "JPEG, PNG, WebP, BMP, GIF, TIFF or PPM"
TO_LEARN = frozenset({"train", "training"})
PARTS = TO_LEARN | frozenset({"val", "valid", "validation", "test", "testing", "eval", "dev"})

MOST_PIXELS = 100_000_000
UNSUSPECTED = 1_000_000  # pixels; smaller images are not checked for implausible compression
MOST_PIXELS_PER_BYTE = 200  # pixels per byte; photographs have fewer than 20
GAP = 3  # ratio by which a cheap first reduction leaves an image larger; PIL documents it as close to exact

Encoded = Path | bytes | None  # None: a row of a table without bytes


def class_folders(root: Path) -> list[Path]:
    """The sub-folders of a folder, one per class, in order of name."""
    with _listing(root):
        found = sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))
    if not found:
        raise DataError(f"{root}: no sub-folders; give a folder with one sub-folder of images per class")
    if all(item.name.lower() in PARTS for item in found):
        raise DataError(_parts_of_a_data_set(root, found))
    return found


def _parts_of_a_data_set(root: Path, parts: list[Path]) -> str:
    """The error for a folder of train and test parts; a test part is never suggested for learning."""
    what = f"{root}: its sub-folders are parts of a data set ({', '.join(part.name for part in parts)}), not classes"
    train = next((part for part in parts if part.name.lower() in TO_LEARN), None)
    if train is None:
        return f"{what}; give a folder with one sub-folder of images per class"
    others = sorted((part for part in parts if part != train), key=lambda part: "test" not in part.name.lower())
    return f"{what}; give {train} to learn" + (f", and {others[0]} to evaluate" if others else "")


def image_files(folder: Path) -> list[Path]:
    """All images below a folder, in order of path, without hidden ones."""
    found: list[Path] = []
    with _listing(folder):
        for place, folders, files in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                suffix = os.path.splitext(name)[1].lower()
                if name.startswith(".") or suffix not in SUFFIXES | FOREIGN:
                    continue
                if suffix in FOREIGN:
                    raise DataError(f"{Path(place, name)}: {suffix} images cannot be read; convert it to JPEG or PNG")
                found.append(Path(place, name))
    if not found:
        raise DataError(f"{folder}: no images; give {READABLE} files")
    return sorted(found)


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """A network's input shape, if images can be brought to it."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(f"images cannot become inputs of shape {list(shape)}: [1 or 3, height, width] was expected")
    return shape[0], shape[1], shape[2]


def fit_all(images: Sequence[Encoded], places: Sequence[str], out: NDArray[np.uint8]) -> None:
    """Decode images into `out`, uint8 [N, C, H, W]; `where` names each in messages."""

    def put(row: int) -> None:
        out[row] = fit(images[row], places[row], image_shape(out.shape[1:]))

    # PIL's warnings on metadata and large sizes do not help a user. The filter is set here and
    # not in the threads, because all of them share it.
    with warnings.catch_warnings(action="ignore"):
        _for_each(put, len(images), small=not images or _small(images[0], places[0]))


def fit_pixels(pictures: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Convert image arrays [N, 1 or 3, height, width] to `out`, uint8 [N, C, H, W], as image files are."""
    from PIL import Image

    def put(row: int) -> None:
        channels_last = pictures[row].transpose(1, 2, 0)
        picture = Image.fromarray(channels_last[..., 0] if len(pictures[row]) == 1 else channels_last)
        out[row] = _stretched(picture, image_shape(out.shape[1:]))

    _for_each(put, len(pictures), small=pictures.shape[2] * pictures.shape[3] <= SMALL)


def fit(image: Encoded, where: str, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Convert one image to a shape [C, H, W]: upright, stretched, 8 bits, on white if transparent."""
    from PIL import ImageOps

    with _opened(image, where) as opened:
        opened.draft(None, (GAP * max(shape[1:]),) * 2)  # JPEG decodes much faster to a fraction of its size
        opened.load()
        with suppress(Exception):  # unreadable metadata does not make the image unreadable
            ImageOps.exif_transpose(opened, in_place=True)
        return _stretched(_plain(opened, where), shape)


def _stretched(plain: Image, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Convert an image in a plain mode to pixels [C, H, W], grayscale or RGB."""
    from PIL import Image

    channels, height, width = shape
    # before converting colours, because the small image needs less memory
    small = plain.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=GAP)
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    pixels = np.asarray(small.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)


@contextmanager
def _opened(image: Encoded, where: str) -> Iterator[Image]:
    """Open an image and check its header; errors inside name its file."""
    from PIL import Image, UnidentifiedImageError

    if not image:
        raise DataError(f"{where}: no image bytes; the file is incomplete, download it again")
    try:
        with limits.opened(image) if isinstance(image, Path) else BytesIO(image) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            with Image.open(stream, formats=FORMATS) as opened:
                _refuse_bombs(opened.width, opened.height, size, where)
                yield opened
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(f"{where}: the image has more than 100 million pixels; make it smaller") from None
    except UnidentifiedImageError:
        raise DataError(f"{where}: is not a supported image; give {READABLE} files") from None
    except Exception as error:  # damaged bytes raise any exception: OSError, SyntaxError, struct.error, ...
        why = " ".join(str(error).split())
        raise DataError(f"{where}: the image cannot be read ({why}); repair or remove it") from error


def _refuse_bombs(width: int, height: int, size: int, where: str) -> None:
    """Refuse images that would decode to gigabytes, by their headers."""
    pixels = width * height
    if pixels > MOST_PIXELS:
        raise DataError(f"{where}: the image has {width}×{height} pixels, more than 100 million; make it smaller")
    if pixels > UNSUSPECTED and pixels > MOST_PIXELS_PER_BYTE * size:
        raise DataError(f"{where}: {width}×{height} pixels in {size} bytes are implausible; make the image smaller")


def _plain(image: Image, where: str) -> Image:
    """Convert an image to a mode that can be resized: L, RGB, or RGBA."""
    from PIL import Image

    # PIL clips 16-bit grayscale at 255 instead of scaling it; older releases open it in the 32-bit mode
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{where}: 32-bit images have no fixed range; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return image.convert("RGBA")
    if image.mode in ("L", "1"):
        return image.convert("L")
    return image.convert("RGB")


def _small(image: Encoded, where: str) -> bool:
    """Whether decoding is so fast that a second thread would only wait for the interpreter lock."""
    with _opened(image, where) as opened:
        return opened.width * opened.height <= SMALL


def _for_each(put: Callable[[int], None], rows: int, small: bool) -> None:
    """Call `put` for every row, in threads unless the images are small."""
    if small:
        for row in range(rows):
            put(row)
        return
    with ThreadPoolExecutor(min(_cores(), MOST)) as pool:
        for _ in pool.map(put, range(rows)):  # in order, so that the first bad image is reported
            pass


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _listing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be listed ({error.strerror})") from error


def _raise(error: OSError) -> None:
    raise error
