"""The interface to data: examples by index, tasks, and streams of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch

from exssnet.errors import DataError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from exssnet.core.engine import Engine


class Data(ABC):
    """Labelled examples on one device, read in batches by index.

    The training loop, KKT and the evaluation read data only through this class, whether it is one tensor in memory
    or decoded lazily from disk.
    """

    capturable: bool = False  # whether `batch` can be part of a CUDA graph
    labels: Tensor  # int64 [N], on `device`; 0..classes-1, local to the task
    classes: int
    shape: tuple[int, ...]  # of one input of the network, for example (3, 32, 32)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    @abstractmethod
    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs [B, *shape] and labels [B] of the examples at `index` (int64, on `device`).

        Inputs are float32, or int64 for indices such as tokens.
        With a generator (on `device`) the inputs are augmented with draws from it; without one they are not.
        """

    def examples(self, index: Tensor) -> Tensor:
        """The inputs at `index` for a memory of examples: as stored, with this task's warp."""
        raise InputError("these images are decoded while they are read: a memory of examples needs data in memory")

    def shown(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Make network inputs of stored examples, augmented with a generator; the same for all tasks of a stream."""
        raise InputError("these images are decoded while they are read: a memory of examples needs data in memory")

    def order(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The order in which an epoch shows all examples: int64 [N], on the CPU, drawn from a generator there."""
        return torch.randperm(len(self), generator=generator)

    @abstractmethod
    def to(self, device: str | torch.device) -> Data:
        """The same examples on another device."""

    def use(self, engine: Engine) -> Data:
        """Make batches with this engine from now on, if it has a faster way."""
        return self


@dataclass(frozen=True)
class Task:
    """One task of a stream. The index in `classes` is the local label, the entry the class of the data set."""

    index: int
    name: str
    classes: tuple[int, ...]
    train: Data
    test: Data
    validation: Data | None = None


@dataclass(frozen=True)
class Wording:
    """A task in an encoder's tokens: what is asked of its texts, and the name of each class."""

    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Outline:
    """Facts that a method may know of a stream beforehand."""

    classes: tuple[int, ...]  # of each task
    examples: int = 0  # for training, in all tasks; 0: not counted
    numbers: tuple[tuple[int, ...], ...] = ()  # of each task's classes in the stream, of texts: tasks may share them
    wordings: tuple[Wording, ...] = ()  # of each task, of texts


class Stream(Sequence[Task]):
    """Tasks in the order they are learned; a task's data is made on access and not stored here."""

    name: str
    input_shape: tuple[int, ...]
    max_classes: int
    class_order: list[list[int]]  # per task, the classes of the data set in local order
    data_digests: dict[str, str]  # split -> SHA-256 over decoded inputs and labels
    sample: bool = False  # whether only a part of a data set is here

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def task(self, index: int) -> Task:
        """The task at an index, 0 ≤ index < len."""

    def text_counts(self) -> dict[str, dict[str, int]]:
        """How many texts each split has, and how many of them are empty or were cut; nothing of other data."""
        return {}

    def task_name(self, index: int) -> str:
        return f"task{index + 1}"

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self.task(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of a stream of {len(self)}")
        return self.task(index % len(self))


def check(data: Data, what: str) -> None:
    """Refuse a split that cannot be learned from: empty, or labels outside 0..classes-1."""
    if len(data) == 0:
        raise DataError(f"{what} is empty: give at least one example")
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= data.classes:
        raise DataError(
            f"{what} has labels from {low} to {high}, outside 0 to {data.classes - 1}: "
            f"number the classes from 0, or give a larger number of classes"
        )
