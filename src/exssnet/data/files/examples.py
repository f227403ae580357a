"""A user's examples in Python, checked before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from exssnet.data.dataset import Dataset
from exssnet.data.limits import MOST_CLASSES, require_numbered
from exssnet.data.tasks import Data
from exssnet.data.tensors import Shared, TensorData, TensorSplit
from exssnet.data.transforms import Normalize
from exssnet.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = Tensor | NDArray[Any]
    Examples = Data | tuple[Array, Array] | TorchDataset[Any] | DataLoader[Any]


def as_data(train: Examples, classes: int | None = None) -> Data:
    """Make `Data` of examples: an `(x, y)` pair of tensors or arrays, a map-style dataset, or a DataLoader of one.

    uint8 inputs are images and are scaled to 0..1; float inputs are converted to float32; int64 inputs are indices,
    such as tokens, and are not converted.
    The default of `classes` is the largest label plus one, and at least two must occur; give `classes` for a test
    part, in which some may be missing. Everything is read once, through a DataLoader's sampler and collate function;
    random transforms of a Dataset are drawn once, and batches are drawn here.
    """
    if isinstance(train, Data):
        return train
    inputs, labels = read_examples(train)
    classes = count_classes(labels) if classes is None else classes
    check_labels(labels, classes)
    normalize = Normalize.unit() if inputs.dtype == torch.uint8 else None
    return TensorData(Shared(inputs), torch.arange(len(labels)), labels, classes, normalize)


def as_inputs(x: Array) -> Tensor:
    """Check and scale inputs without labels, as `as_data` does."""
    inputs = _inputs(_tensor(x, "inputs"))
    return Normalize.unit()(inputs, None) if inputs.dtype == torch.uint8 else inputs


def from_tensors(name: str, train: Examples, test: Examples, class_names: list[str] | None = None) -> Dataset:
    """Make a data set of examples in memory, to be split into tasks; inputs are scaled as in `as_data`."""
    train_x, train_y = read_examples(train)
    test_x, test_y = read_examples(test)
    if train_x.shape[1:] != test_x.shape[1:]:
        raise InputError(f"train inputs are {list(train_x.shape[1:])}, test inputs {list(test_x.shape[1:])}")
    names = class_names or [str(label) for label in range(count_classes(train_y))]
    for labels in (train_y, test_y):
        check_labels(labels, len(names))
    parts = [
        TensorSplit(x, y, normalize=Normalize.unit() if x.dtype == torch.uint8 else None)
        for x, y in ((train_x, train_y), (test_x, test_y))
    ]
    return Dataset(name, parts[0], parts[1], names, tuple(train_x.shape[1:]))


def read_examples(examples: Examples) -> tuple[Tensor, Tensor]:
    """Read inputs [N, ...] (uint8, int64 or finite float32) and labels int64 [N], on the CPU."""
    if isinstance(examples, DataLoader):
        examples = _one_pass(examples)
    if isinstance(examples, TorchDataset):
        examples = _stacked(examples)
    if not isinstance(examples, tuple | list) or len(examples) != 2:
        raise InputError(
            f"examples are a {type(examples).__name__}: give a pair (inputs, labels) of tensors or arrays, "
            "a map-style torch Dataset, or a DataLoader"
        )
    inputs, labels = _inputs(_tensor(examples[0], "inputs")), _labels(_tensor(examples[1], "labels"))
    if len(inputs) != len(labels):
        raise InputError(f"{len(inputs)} inputs but {len(labels)} labels: give one label for each input")
    return inputs, labels


def require_two_classes(labels: Tensor) -> None:
    """Refuse labels of fewer than two classes."""
    if bool((labels == labels[0]).all()):
        raise InputError(f"all labels are {int(labels[0])}: a task needs at least two classes")


def count_classes(labels: Tensor) -> int:
    """Number of classes, which must be enough for a task."""
    require_two_classes(labels)
    require_numbered(int(labels.max()), len(torch.unique(labels)))
    return max(int(labels.max()) + 1, 2)


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels outside 0..classes-1."""
    if classes < 2:
        raise InputError(f"classes is {classes}: a task needs at least two classes")
    if classes > MOST_CLASSES:
        raise InputError(f"classes is {classes:,}: a task can have up to {MOST_CLASSES:,}")
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise InputError(f"label {int(labels[row])} of example {row} is not in 0 to {classes - 1}")


def _tensor(values: object, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        native = values.dtype.newbyteorder("=")
        return torch.from_numpy(np.require(values, native, ["C", "W"]))
    kind = f"array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
    raise InputError(f"{what} are a {kind}: give a tensor or a numeric array")


def _inputs(inputs: Tensor) -> Tensor:
    if inputs.ndim < 2 or inputs.numel() == 0:
        raise InputError(f"inputs have shape {list(inputs.shape)}: give at least one example, as [N, ...]")
    if inputs.dtype == torch.uint8:
        return inputs
    if inputs.dtype == torch.int64:
        return inputs
    if not inputs.is_floating_point():
        raise InputError(f"inputs are {inputs.dtype}: give floats, uint8 images, or int64 indices")
    inputs = inputs.float()
    if not inputs.isfinite().all():
        row = int((~inputs.flatten(1).isfinite().all(dim=1)).nonzero()[0])
        raise InputError(f"input {row} has NaN or infinity: remove or repair it")
    return inputs


def _labels(labels: Tensor) -> Tensor:
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels are {labels.dtype}: give integers")
    if labels.ndim != 1:
        raise InputError(f"labels have shape {list(labels.shape)}: give one integer for each input, as [N]")
    return labels.long()


def _one_pass(loader: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Read all batches of a loader once, with its sampler and collate function."""
    batches = list(loader)
    try:
        pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in batches]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"the DataLoader does not return batches (inputs, labels) that match: {why}") from error


def _stacked(dataset: TorchDataset[Any]) -> tuple[Tensor, Tensor]:
    if not hasattr(dataset, "__len__"):
        raise InputError(f"{type(dataset).__name__} has no length: give a map-style dataset")
    samples = [_sample(dataset, row) for row in range(len(dataset))]
    if not samples:
        raise InputError(f"{type(dataset).__name__} is empty: give at least one example")
    first = samples[0][0].shape
    for row, (x, _) in enumerate(samples):
        if x.shape != first:
            raise InputError(f"example {row} has shape {list(x.shape)}, the first {list(first)}: make them equal")
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def _sample(dataset: TorchDataset[Any], row: int) -> tuple[Tensor, Tensor]:
    try:
        x, y = dataset[row]
        return torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"example {row} of {type(dataset).__name__} is not a pair (array, integer label): {error}"
        ) from error
