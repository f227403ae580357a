"""Read a user's labelled files as tensors, and inputs for prediction in the same way.

Folders with a sub-folder of images per class, images in the hub's parquet layout, tables (.csv, .parquet) and NumPy
arrays (.npz, .npy) become inputs, labels and class names, with a recipe that a model stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exssnet.data.files.arrays import fitting, labelled_arrays, unlabelled_arrays
from exssnet.data.files.naming import label_names, settle
from exssnet.data.files.pictures import class_folders, fit_all, image_files, image_shape
from exssnet.data.files.tables import image_column, label_column, parquet_images, parquet_labels, read_table
from exssnet.data.limits import require_memory
from exssnet.data.streams import Holdout, rows_by_class
from exssnet.errors import DataError, InputError

DEFAULT_IMAGE = (3, 32, 32)  # constant, so that a network made for the first task fits the images of later ones
TABLES = (".csv", ".parquet")
IMAGES = "images"  # a material
ARRAYS = (".npz", ".npy")

Recipe = Mapping[str, Any]
Shape = tuple[int, ...] | None
Names = list[str] | None
Rows = Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Labelled:
    """Examples with their labels and recipe."""

    inputs: Tensor  # images uint8 [N, C, H, W], tables float32 [N, F], arrays uint8, float32 or int64 [N, ...]
    labels: Tensor  # int64 [N], 0 to len(classes) - 1
    classes: list[str]  # names in order of label
    recipe: dict[str, Any]  # JSON: "kind", "shape"; of tables "columns", of arrays "dtype"
    path: Path | None = None  # where they were read
    second: Path | None = None  # the file of their labels, if separate


def read_labelled(
    path: Path,
    shape: tuple[int, ...] | None = None,
    label: str | None = None,
    labels: Path | None = None,
    classes: list[str] | None = None,
    recipe: Recipe | None = None,
    rows: Rows = None,
) -> Labelled:
    """Read examples and labels from a folder of images or from a .parquet, .npz, .npy or .csv file.

    `shape` is the input shape of the network: images, also in arrays of uint8, are stretched to it, other inputs must
    have it. Without it images become 3×32×32, and tables and arrays keep their shape. `label` names the label column
    (or the array of an .npz), `labels` the second file of a .npy. To read further examples of a learned task, give its
    `classes` and `recipe`: labels are numbered and columns ordered as before. `rows` selects some of the examples by
    the labels of all.
    """
    path = _existing(path)
    if labels is not None and _suffix(path) != ".npy":
        raise InputError(f"--labels is {labels}, but {path} has its own labels; --labels belongs to a .npy file")
    columns = None
    if recipe is not None:
        shape, columns = recipe["shape"], recipe.get("columns")
    found = _find(path, None if shape is None else tuple(shape), label, labels, classes, columns, rows)
    if recipe is not None and material(recipe) != material(found.recipe):
        raise DataError(f"{path}: has {material(found.recipe)}, but the task was learned from {material(recipe)}")
    return replace(found, path=path, second=labels)


def read_inputs(paths: list[Path], recipe: Recipe) -> tuple[Tensor, list[str]]:
    """Read inputs without labels by the recipe of a learned task, and a name for each.

    The name is the name of an image file, its path in a folder (with the folder's name if there are several), or a row
    such as `pumps.csv:3`: the line of a .csv, or the row from 0 in other files.
    """
    if not paths:
        raise InputError("no files to read: give at least one")
    files = [_existing(path) for path in paths]
    short = Counter(file.name for file in files)
    names = [file.name if short[file.name] == 1 else str(file) for file in files]
    if material(recipe) == IMAGES and not any(file.is_dir() or _suffix(file) in TABLES + ARRAYS for file in files):
        return _images(files, recipe["shape"]), names  # all together, for the threads
    if sum(file.is_dir() for file in files) < 2:  # the paths in one folder differ
        names = ["" if file.is_dir() else name for file, name in zip(files, names, strict=True)]
    parts = [_unlabelled(file, name, recipe) for file, name in zip(files, names, strict=True)]
    return torch.cat([inputs for inputs, _ in parts]), [name for _, names in parts for name in names]


def scaling(inputs: Tensor) -> dict[str, Any]:
    """Find the scaling of inputs, as JSON: per channel of images, per column of tables, none for indices.

    Other shapes get one mean and deviation.
    """
    if inputs.dtype == torch.int64:
        return {}
    pixels = inputs.dtype == torch.uint8
    own = inputs.ndim == 4 or (inputs.ndim == 2 and not pixels)
    groups = inputs.transpose(0, 1) if own else inputs[None]
    moments = [_byte_moments(group) if pixels else _float_moments(group) for group in groups]
    found: dict[str, Any] = {"mean": [mean for mean, _ in moments], "std": [std for _, std in moments]}
    return {"scale": 1 / 255} | found if pixels else found


def scaled(inputs: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """`(x · scale - mean) / std` in float32, with the values of `scaling`; int64 is unchanged."""
    if inputs.dtype == torch.int64:
        return inputs
    if not scaling:
        return inputs.float()
    mean, std = (torch.tensor(scaling[key], dtype=torch.float32, device=inputs.device) for key in ("mean", "std"))
    if len(mean) > 1:
        if inputs.ndim < 2 or inputs.shape[1] != len(mean):
            raise InputError(f"inputs have shape {list(inputs.shape)}, their scaling is for [N, {len(mean)}, ...]")
        mean, std = (value.view(-1, *[1] * (inputs.ndim - 2)) for value in (mean, std))
    scale: float = scaling.get("scale", 1.0)
    return (inputs.float() * scale - mean) / std


def hold_out(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split rows for training and validation: this fraction of each class, at least one of each if there are two."""
    holdout = Holdout(validation=share, seed=seed)
    if not len(labels):
        return labels.long(), labels.long()
    cuts = [
        holdout.cut(rows, label)
        for label, rows in enumerate(rows_by_class(labels, int(labels.max()) + 1))
        if len(rows)
    ]  # fmt: skip
    return torch.cat([kept for kept, _ in cuts]).sort().values, torch.cat([held for _, held in cuts]).sort().values


def _find(
    path: Path, shape: Shape, label: str | None, labels: Path | None, classes: Names, columns: Names, choose: Rows
) -> Labelled:
    suffix = _suffix(path)
    if path.is_dir():
        if label is not None:
            raise InputError(f"--label is '{label}', but {path} is a folder: its sub-folders are the labels")
        return _folder(path, shape, classes, choose)
    if suffix in ARRAYS:
        return _some(_arrays(path, shape, label, labels, classes), choose)
    if suffix not in TABLES:
        raise DataError(
            f"{path}: unknown type of file '{suffix}'; give a folder with one sub-folder of images per class, "
            "or a .parquet, .npz, .npy or .csv file"
        )
    label = label_column(path, label)
    if suffix == ".parquet" and (images := image_column(path)):
        return _image_rows(path, shape, images, label, classes, choose)
    return _some(_table(path, shape, label, classes, columns), choose)


def _some(found: Labelled, choose: Rows) -> Labelled:
    if choose is None:
        return found
    rows = choose(found.labels)
    return replace(found, inputs=found.inputs[rows], labels=found.labels[rows])


def _folder(root: Path, shape: Shape, classes: Names, choose: Rows) -> Labelled:
    folders = class_folders(root)
    inside = [image_files(folder) for folder in folders]
    files = [file for part in inside for file in part]
    names = [folder.name for folder, part in zip(folders, inside, strict=True) for _ in part]
    # labels before images here and below: errors in labels should not take minutes to find
    labels, classes = settle(names, None, classes, lambda row: str(files[row]), root)
    if choose is not None:
        rows = choose(labels)
        files, labels = [files[row] for row in rows.tolist()], labels[rows]
    inputs = _images(files, shape or DEFAULT_IMAGE)
    return Labelled(inputs, labels, classes, _recipe("image", inputs))


def _image_rows(file: Path, shape: Shape, column: str, label: str, classes: Names, choose: Rows) -> Labelled:
    def where(row: int) -> str:
        return f"{file}, row {row}"

    written, own = parquet_labels(file, label)
    labels, classes = settle(label_names(written, own, classes, where), own, classes, where, file)
    rows = None if choose is None else choose(labels)
    labels = labels if rows is None else labels[rows]
    inputs = parquet_images(file, column, image_shape(shape or DEFAULT_IMAGE), rows)
    return Labelled(inputs, labels, classes, _recipe("image", inputs))


def _table(file: Path, shape: Shape, label: str, classes: Names, columns: Names) -> Labelled:
    table = read_table(file, label, columns)
    if shape is not None and shape != (len(table.columns),):
        raise DataError(
            f"{file}: has {len(table.columns)} columns besides the label '{label}', the network needs {list(shape)}"
        )
    names = label_names(table.labels, table.own, classes, table.where)
    labels, classes = settle(names, table.own, classes, table.where, file)
    recipe = _recipe("table", table.values) | {"columns": table.columns}
    return Labelled(table.values, labels, classes, recipe)


def _arrays(file: Path, shape: Shape, label: str | None, second: Path | None, classes: Names) -> Labelled:
    def where(row: int) -> str:
        return f"{file}, row {row}"

    array, written = labelled_arrays(file, second and _existing(second), label)
    labels, classes = settle(label_names(written, None, classes, where), None, classes, where, file)
    inputs = fitting(array, shape, file)
    dtype = str(inputs.dtype).removeprefix("torch.")
    return Labelled(inputs, labels, classes, _recipe("array", inputs) | {"dtype": dtype})


def _unlabelled(path: Path, name: str, recipe: Recipe) -> tuple[Tensor, list[str]]:
    """Read the inputs of one file or folder of this name, and their names."""
    suffix, shape, wanted = _suffix(path), tuple(recipe["shape"]), material(recipe)
    if wanted == "a table":
        if suffix not in TABLES:
            raise DataError(f"{path}: the task was learned from a table; give a .csv or .parquet with its columns")
        table = read_table(path, None, recipe["columns"])
        return table.values, [f"{name}:{row}" for row in table.rows]
    if suffix in ARRAYS:
        inputs = unlabelled_arrays(path, shape, recipe.get("dtype", "uint8"))
    elif wanted != IMAGES:
        raise DataError(f"{path}: the task was learned from {wanted}; give them as a .npy or .npz file")
    elif suffix == ".csv":
        raise DataError(
            f"{path}: the task was learned from images; give image files, or a .parquet, .npy or .npz of them"
        )
    elif suffix == ".parquet" and (column := image_column(path)):
        inputs = parquet_images(path, column, image_shape(shape))
    elif path.is_dir():
        files = image_files(path)
        return _images(files, shape), [(Path(name) / file.relative_to(path)).as_posix() for file in files]
    else:
        return _images([path], shape), [name]
    return inputs, [f"{name}:{row}" for row in range(len(inputs))]


def _images(files: list[Path], shape: Sequence[int]) -> Tensor:
    require_memory(files[0].parent, len(files) * prod(shape))
    out = np.empty((len(files), *image_shape(shape)), np.uint8)
    fit_all(files, [str(file) for file in files], out)
    return torch.from_numpy(out)


def _recipe(kind: str, inputs: Tensor) -> dict[str, Any]:
    return {"kind": kind, "shape": list(inputs.shape[1:])}


def material(recipe: Recipe) -> str:
    """The type of inputs of a recipe, in words; arrays of pixels are images too."""
    shape = recipe["shape"]
    if recipe["kind"] == "table":
        return "a table"
    if recipe["kind"] == "image" or (recipe["dtype"] == "uint8" and len(shape) == 3 and shape[0] in (1, 3)):
        return IMAGES
    return f"{recipe['dtype']} arrays"


def _existing(path: Path) -> Path:
    try:
        path = Path(path).expanduser()
        path.stat()
    # a NUL or a lone surrogate in the name is a ValueError, the home of an unknown user a RuntimeError
    except (FileNotFoundError, NotADirectoryError, ValueError, RuntimeError):
        raise DataError(f"{path}: no such file or folder; check the path") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return path


def _suffix(path: Path) -> str:
    """The suffix of a file; empty for a folder, whose name may contain a dot."""
    return "" if path.is_dir() else path.suffix.lower()


def _byte_moments(values: Tensor) -> tuple[float, float]:
    """Mean and deviation of bytes divided by 255; from their counts, so exact and without a large copy."""
    counts = torch.bincount(values.reshape(-1), minlength=256).double()
    level = torch.arange(256, dtype=torch.float64) / 255
    mean = float((counts * level).sum() / counts.sum())
    deviation = float((counts * (level - mean) ** 2).sum() / counts.sum()) ** 0.5
    return mean, deviation if int((counts > 0).sum()) > 1 else 1.0


def _float_moments(values: Tensor) -> tuple[float, float]:
    """Mean and deviation; values that are constant in float32 are divided by 1."""
    if bool((values == values.reshape(-1)[0]).all()):
        return float(values.reshape(-1)[0]), 1.0
    deviation, mean = torch.std_mean(values.double(), correction=0)
    return float(mean), float(deviation) if deviation > torch.finfo(torch.float32).tiny else 1.0
