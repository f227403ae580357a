"""A user's NumPy files: the arrays of inputs and labels, and their layout.

Images are arrays of uint8. [N, H, W] is grayscale; of four axes the second has the channels if its size is 1 or 3,
otherwise the last. An array that fits the network in one layout is read in that layout.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exssnet.data.files import npy
from exssnet.data.files.examples import read_examples
from exssnet.data.files.pictures import fit_pixels
from exssnet.data.limits import require_memory
from exssnet.errors import DataError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Headers = dict[str, npy.Header]

INPUTS = frozenset({"x", "images", "image", "inputs", "input", "data", "features"})
LABELS = frozenset({"y", "labels", "label", "targets", "target"})
CHANNELS = (1, 3)  # grey, RGB


def labelled_arrays(file: Path, labels: Path | None, label: str | None) -> tuple[NDArray[Any], list[Any]]:
    """Read inputs [N, ...] and labels, as stored, from one .npz or two .npy files."""
    if file.suffix.lower() == ".npy":
        if labels is None:
            raise InputError(f"{file}: has no labels; give a second .npy file of labels (--labels)")
        x, y, names = _only(file), _only(labels), (file.name, labels.name)
    else:
        names = _pair(file, npy.headers(file), label)
        x, y = npy.read(file, *names)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{file}: the labels '{names[1]}' have shape {list(y.shape)}; give one for each input, as [N]")
    if x.ndim == 0 or len(x) != len(y):
        count = len(x) if x.ndim else "a single number"
        raise DataError(f"{file}: inputs '{names[0]}' are {count}, labels '{names[1]}' {len(y)}; give one for each")
    return x, y.tolist()


def unlabelled_arrays(file: Path, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Read inputs [N, *shape] of an .npz or .npy file, of the learned type."""
    arrays = npy.headers(file)
    chosen = [name for name in arrays if len(arrays) == 1 or name.lower() in INPUTS]
    if len(chosen) != 1:
        raise DataError(f"{file}: has {_listed(arrays)}, and the inputs are ambiguous; name one of them x")
    array = npy.read(file, chosen[0])[0]
    if array.shape == shape or (array.ndim == 2 and (1, *array.shape) == shape):
        array = array[None]  # a single example
    if dtype == "float32" and array.dtype.kind in "iu" and array.dtype != np.uint8:
        array = array.astype(np.float32)  # other whole numbers than learned; bytes may be pixels
    inputs = fitting(array, shape, file)
    found = str(inputs.dtype).removeprefix("torch.")
    if found != dtype:
        raise DataError(f"{file}: the inputs are {found}, but the task was learned from {dtype}; convert them")
    return inputs


def fitting(array: NDArray[Any], shape: tuple[int, ...] | None, file: Path) -> Tensor:
    """Convert inputs to [N, *shape]: uint8 images are resized, other arrays must have the shape."""
    try:
        with np.errstate(over="ignore"):
            arranged = _arranged(array, shape, file)
            return read_examples((arranged, np.zeros(len(arranged), np.int64)))[0]  # floats in float32, all finite
    except InputError as error:
        raise DataError(f"{file}: {error}") from error


def _pair(file: Path, arrays: Headers, label: str | None) -> tuple[str, str]:
    """The names of the inputs and the labels in an .npz."""
    if label is not None and label not in arrays:
        raise DataError(f"{file}: no array '{label}'; it has {_listed(arrays)}")
    inputs = [name for name in arrays if name.lower() in INPUTS and name != label]
    labels = [name for name in arrays if name.lower() in LABELS] if label is None else [label]
    if len(inputs) == len(labels) == 1:
        return inputs[0], labels[0]
    if label is None:
        labels = [name for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "iu"]
    pairs = [
        (x, y) for y in labels for x in arrays
        if x != y and arrays[x].ndim > 1 and arrays[y].ndim > 0 and arrays[x].shape[0] == arrays[y].shape[0]
    ]  # fmt: skip
    if len(pairs) != 1:
        raise DataError(
            f"{file}: has {_listed(arrays)}, and inputs and labels are ambiguous; name them x and y, "
            "or give the name of the labels (--label)"
        )
    return pairs[0]


def _arranged(array: NDArray[Any], shape: tuple[int, ...] | None, file: Path) -> NDArray[Any]:
    """Fit inputs as stored, with channels moved to the second axis, or, for images, resized."""
    have, pictures = array.shape[1:], _pictures(array)
    if shape is None:
        if pictures is None and array.ndim == 4 and have[2] in CHANNELS and have[0] not in CHANNELS:
            return array.transpose(0, 3, 1, 2)  # floats, channels last
        return array if pictures is None else pictures
    if have == shape:
        return array
    if (1, *have) == shape and array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and (have[2], *have[:2]) == shape:
        return array.transpose(0, 3, 1, 2)
    # one colour image, rather than many that are three pixels wide, or three grayscale ones
    one = array.ndim == 3 and (have[1] in CHANNELS or len(array) == shape[0] == 3)
    if pictures is None or one or not array.size or len(shape) != 3 or shape[0] not in CHANNELS:
        raise DataError(f"{file}: the inputs have shape {list(array.shape)}, the network needs [N, {_joined(shape)}]")
    require_memory(file, len(array) * prod(shape))
    out = np.empty((len(array), *shape), np.uint8)
    fit_pixels(pictures, out)
    return out


def _pictures(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Convert to [N, C, H, W], if these can be images."""
    if array.dtype != np.uint8:
        return None
    if array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and array.shape[1] in CHANNELS:
        return array
    if array.ndim == 4 and array.shape[3] in CHANNELS:
        return array.transpose(0, 3, 1, 2)
    return None


def _only(file: Path) -> NDArray[Any]:
    if list(npy.headers(file)) != [npy.ONLY]:
        raise DataError(f"{file}: has several arrays; give a .npy file with one")
    return npy.read(file, npy.ONLY)[0]


def _listed(arrays: Headers) -> str:
    return ", ".join(f"{name} {header}" for name, header in arrays.items())


def _joined(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
