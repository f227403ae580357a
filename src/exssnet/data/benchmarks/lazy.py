"""Data too large to decode beforehand: images are read, decoded and cropped per batch."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exssnet.data.benchmarks.encoded import Encoded, ImageFiles, ParquetImages
from exssnet.data.benchmarks.hub import parquet_files
from exssnet.data.benchmarks.parquet import class_names, read_labels
from exssnet.data.benchmarks.registry import IMAGENET_MEAN, IMAGENET_STD, Source
from exssnet.data.dataset import Dataset, Split
from exssnet.data.pixels import open_image
from exssnet.data.tasks import Data
from exssnet.data.transforms import Normalize, Pipeline, Transform
from exssnet.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

SIZE = 224
RESIZED = 256  # shorter side before the centre crop
ATTEMPTS = 10  # attempts to draw a crop that fits, as is usual; then the largest centre crop
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class LazyImages(Data):
    """Encoded images, decoded in threads: a random resized crop with a generator, the centre without one."""

    def __init__(self, encoded: Encoded, rows: Tensor, labels: Tensor, classes: int, transform: Transform) -> None:
        self.labels = labels
        self.classes = classes
        self.shape = (3, SIZE, SIZE)
        self._encoded = encoded
        self._rows = rows.cpu()
        self._transform = transform.to(labels.device)

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        rows = self._rows[index.cpu()].tolist()
        draws: list[NDArray[np.float64] | None] = [None] * len(rows)
        if generator is not None:
            # a fixed number of draws per image, so that the size of one image does not affect another's crop
            shape = (len(rows), ATTEMPTS + 1, 4)
            uniform = torch.rand(shape, generator=generator, device=self.device)
            draws = list(uniform.cpu().double().numpy())
        images = list(_pool(os.getpid()).map(self._image, rows, draws))
        x = torch.from_numpy(np.stack(images)).to(self.device).permute(0, 3, 1, 2)
        return self._transform(x, generator).float(), self.labels[index]

    def _image(self, row: int, draw: NDArray[np.float64] | None) -> NDArray[np.uint8]:
        encoded, where = self._encoded.read(row)
        image = open_image(encoded, where, "RGB")
        return np.asarray(centre(image) if draw is None else random_crop(image, draw))

    def to(self, device: str | torch.device) -> LazyImages:
        return LazyImages(self._encoded, self._rows, self.labels.to(device), self.classes, self._transform)


class LazySplit(Split):
    """A split that stays encoded on disk; only its labels are in memory."""

    def __init__(self, encoded: Encoded, labels: Tensor, digest: str, normalize: Normalize) -> None:
        self.labels = labels
        self.digest = digest
        self._encoded = encoded
        self._normalize = normalize

    def select(self, rows: Tensor, labels: Tensor, classes: int, warp: tuple[Transform, ...] = ()) -> LazyImages:
        return LazyImages(self._encoded, rows, labels, classes, Pipeline((*warp, self._normalize)))


def hub_images(source: Source) -> Dataset:
    """Open a hub data set of encoded images; only the label column is read."""
    assert source.hub_id is not None
    train_files = parquet_files(source.hub_id, source.train_split)
    test_files = parquet_files(source.hub_id, source.test_split)
    train, test = (_parquet_split(source, files) for files in (train_files, test_files))
    return Dataset(source.name, train, test, class_names(train_files[0], source), source.shape)


def image_folder(root: str | Path, name: str = "folder") -> Dataset:
    """Open images as `<root>/train/<class>/*.jpg` and `<root>/val/<class>/*.jpg`; classes in order of name."""
    root = Path(root).expanduser()
    names = _subfolders(root / "train")
    if _subfolders(root / "val") != names:
        differ = sorted(set(names) ^ set(_subfolders(root / "val")))
        raise DataError(f"{root}: class {differ[0]} is missing in train or val; give both the same classes")
    train, test = (_folder_split(root / part, names) for part in ("train", "val"))
    return Dataset(name, train, test, names, (3, SIZE, SIZE))


def centre(image: Image) -> Image:
    """Resize the shorter side and crop the centre, in one resampling of that part of the image."""
    from PIL.Image import Resampling

    side = min(image.size) * SIZE / RESIZED
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.resize((SIZE, SIZE), Resampling.BILINEAR, (left, top, left + side, top + side))


def random_crop(image: Image, draw: NDArray[np.float64]) -> Image:
    """Crop 8 to 100 % of the area at an aspect ratio from 3/4 to 4/3 and resize it; flip half of the images.

    `draw` is uniform [ATTEMPTS + 1, 4]: area, aspect, horizontal and vertical offset; the last row decides
    flipping.
    """
    from PIL.Image import Resampling, Transpose

    box = _crop_box(image.width, image.height, draw[:ATTEMPTS])
    cut = image.resize((SIZE, SIZE), Resampling.BILINEAR, box)
    return cut.transpose(Transpose.FLIP_LEFT_RIGHT) if draw[ATTEMPTS, 0] < 0.5 else cut


def _crop_box(width: int, height: int, draw: NDArray[np.float64]) -> tuple[float, float, float, float]:
    area = width * height * (0.08 + 0.92 * draw[:, 0])
    ratio = (4 / 3) ** (2 * draw[:, 1] - 1)
    across, down = np.sqrt(area * ratio).round(), np.sqrt(area / ratio).round()
    fits = (across >= 1) & (down >= 1) & (across <= width) & (down <= height)
    if fits.any():
        first = int(fits.argmax())
        w, h = float(across[first]), float(down[first])
        left, top = (
            math.floor(draw[first, 2] * (width - w + 1)),
            math.floor(draw[first, 3] * (height - h + 1)),
        )
    else:
        w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
        left, top = math.floor((width - w) / 2), math.floor((height - h) / 2)
    return left, top, left + w, top + h


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The decoding threads of a process; a forked process needs its own."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="exssnet-decode")


def _parquet_split(source: Source, files: list[Path]) -> LazySplit:
    labels = [read_labels(file, source) for file in files]
    encoded = ParquetImages(source, files, [len(found) for found in labels])
    sizes = [(file.name, file.stat().st_size) for file in files]
    return LazySplit(encoded, torch.cat(labels), _digest(sizes, torch.cat(labels)), source.normalize())


def _folder_split(folder: Path, names: list[str]) -> LazySplit:
    files: list[str] = []
    sizes: list[tuple[str, int]] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted((item for item in os.scandir(folder / name)), key=lambda item: item.name)
        for item in found:
            if os.path.splitext(item.name)[1].lower() in SUFFIXES:
                files.append(item.path)
                sizes.append((f"{name}/{item.name}", item.stat().st_size))
                labels.append(label)
    if not files:
        raise DataError(f"{folder}: no images ({', '.join(sorted(SUFFIXES))}) in its class folders")
    found_labels = torch.tensor(labels, dtype=torch.int64)
    normalize = Normalize.channels(1 / 255, IMAGENET_MEAN, IMAGENET_STD)
    return LazySplit(ImageFiles(files), found_labels, _digest(sizes, found_labels), normalize)


def _subfolders(folder: Path) -> list[str]:
    try:
        return sorted(item.name for item in os.scandir(folder) if item.is_dir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); expected a folder for each class") from error


def _digest(files: list[tuple[str, int]], labels: Tensor) -> str:
    """SHA-256 of file names, sizes and labels, without reading the images."""
    digest = hashlib.sha256("\n".join(f"{name} {size}" for name, size in files).encode())
    digest.update(labels.numpy().data)
    return digest.hexdigest()
