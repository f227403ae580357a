"""Streams of tasks from one data set: groups of classes, permuted pixels, or rotated images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exssnet.data.tasks import Data, Stream, Task, check
from exssnet.data.transforms import Permute, Rotate, Transform
from exssnet.errors import DataError, InputError
from exssnet.randomness import generator

if TYPE_CHECKING:
    from exssnet.data.dataset import Dataset, Split

Warp = Callable[[int], Transform]  # the warp of the task at an index


@dataclass(frozen=True)
class Holdout:
    """Split of the training rows of each class; drawn per class, independently of other classes."""

    validation: float = 0.0  # fraction of each class
    samples_per_class: int | None = None  # number of the remaining training rows
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise InputError(f"validation is {self.validation}: give a fraction, at least 0 and below 1")
        if self.samples_per_class is not None and self.samples_per_class < 1:
            raise InputError(f"samples_per_class is {self.samples_per_class}: give at least 1, or None for all")

    def cut(self, rows: Tensor, label: int) -> tuple[Tensor, Tensor]:
        """Train and validation rows of one class, in the data set's order."""
        held = 0
        if self.validation:
            held = min(max(round(self.validation * len(rows)), 1), len(rows) - 1)
        shuffled = rows[torch.randperm(len(rows), generator=generator(self.seed, "holdout", label))]
        # train is drawn from the other end, so it is the same with and without validation
        kept = len(rows) - held
        if self.samples_per_class is not None:
            kept = min(kept, self.samples_per_class)
        return shuffled[len(rows) - kept :].sort().values, shuffled[:held].sort().values


@dataclass(frozen=True)
class Permutations:
    """A pixel permutation for each task."""

    seed: int
    pixels: int

    def __call__(self, index: int) -> Permute:
        return Permute(torch.randperm(self.pixels, generator=generator(self.seed, "permutation", index)))


@dataclass(frozen=True)
class Rotations:
    """Angles evenly spaced over 180 degrees."""

    tasks: int

    def __call__(self, index: int) -> Rotate:
        return Rotate(index * 180 / self.tasks)


class ClassStream(Stream):
    """Tasks that each have some classes of one data set and their own warp."""

    def __init__(
        self,
        name: str,
        dataset: Dataset,
        groups: list[list[int]],
        holdout: Holdout,
        warp: Warp | None = None,
    ) -> None:
        self.name = name
        self.input_shape = dataset.shape
        self.max_classes = max(len(group) for group in groups)
        self.class_order = groups
        self.data_digests = dataset.digests
        self._dataset = dataset
        self._holdout = holdout
        self._warp = warp
        self._train_rows = rows_by_class(dataset.train.labels, dataset.classes)
        self._test_rows = rows_by_class(dataset.test.labels, dataset.classes)
        for index, group in enumerate(groups):
            if sum(len(self._train_rows[label]) > 0 for label in group) < 2:
                raise DataError(
                    f"task {index + 1} of {name} has training examples of fewer than two classes: "
                    f"a task needs at least two"
                )

    def __len__(self) -> int:
        return len(self.class_order)

    def task(self, index: int) -> Task:
        group = self.class_order[index]
        cuts = [self._holdout.cut(self._train_rows[label], label) for label in group]
        warp = (self._warp(index),) if self._warp else ()
        train = _examples(self._dataset.train, [kept for kept, _ in cuts], warp)
        test = _examples(self._dataset.test, [self._test_rows[label] for label in group], warp)
        validation = None
        if self._holdout.validation:
            validation = _examples(self._dataset.train, [held for _, held in cuts], warp)
            check(validation, f"validation part of task {index} of {self.name}")
        check(train, f"train split of task {index} of {self.name}")
        check(test, f"test split of task {index} of {self.name}")
        return Task(index, self.task_name(index), tuple(group), train, test, validation)


def split(
    dataset: Dataset,
    tasks: int,
    order: Sequence[int] | None = None,
    validation: float = 0.0,
    validation_seed: int = 0,
    samples_per_class: int | None = None,
) -> Stream:
    """Disjoint groups of classes in the given `order` (default: all classes by number; a part is allowed).

    If the number of classes is not a multiple, the first tasks get one class more.
    """
    order = _checked_order(dataset, order)
    groups = _groups(order, tasks)
    holdout = Holdout(validation, samples_per_class, validation_seed)
    return ClassStream(f"split-{dataset.name}", dataset, groups, holdout)


def permuted(
    dataset: Dataset,
    tasks: int,
    seed: int,
    validation: float = 0.0,
    validation_seed: int = 0,
    samples_per_class: int | None = None,
) -> Stream:
    """All classes in every task, each task with its own pixel permutation."""
    warp = Permutations(seed, math.prod(dataset.shape[-2:]))
    holdout = Holdout(validation, samples_per_class, validation_seed)
    return ClassStream(f"permuted-{dataset.name}", dataset, _repeated(dataset, tasks), holdout, warp)


def rotated(
    dataset: Dataset,
    tasks: int,
    validation: float = 0.0,
    validation_seed: int = 0,
    samples_per_class: int | None = None,
) -> Stream:
    """All classes in every task, task i rotated by i · 180 / tasks degrees."""
    if len(dataset.shape) != 3:
        raise InputError(f"cannot rotate inputs of shape {dataset.shape}: give images [channels, height, width]")
    holdout = Holdout(validation, samples_per_class, validation_seed)
    return ClassStream(f"rotated-{dataset.name}", dataset, _repeated(dataset, tasks), holdout, Rotations(tasks))


def rows_by_class(labels: Tensor, classes: int) -> tuple[Tensor, ...]:
    """For every class its rows, in order; views of one tensor."""
    counts = torch.bincount(labels, minlength=classes)
    return torch.split(labels.argsort(stable=True), counts.tolist())


def _examples(source: Split, rows: list[Tensor], warp: tuple[Transform, ...]) -> Data:
    labels = torch.cat([torch.full_like(part, local) for local, part in enumerate(rows)])
    return source.select(torch.cat(rows), labels, len(rows), warp)


def _checked_order(dataset: Dataset, order: Sequence[int] | None) -> list[int]:
    order = list(range(dataset.classes)) if order is None else [int(label) for label in order]
    wrong = [label for label in order if not 0 <= label < dataset.classes]
    if wrong:
        raise InputError(f"class order has {wrong[0]}: {dataset.name} has the classes 0 to {dataset.classes - 1}")
    if len(set(order)) < len(order):
        twice = next(label for label in order if order.count(label) > 1)
        raise InputError(f"class order has {twice} more than once: give every class at most once")
    return order


def _groups(order: list[int], tasks: int) -> list[list[int]]:
    _check_count(tasks)
    if len(order) < 2 * tasks:
        raise InputError(
            f"{len(order)} classes are too few for {tasks} tasks: a task needs at least two classes, "
            f"so give at most {len(order) // 2} tasks"
        )
    size, larger = divmod(len(order), tasks)
    ends = accumulate((size + (index < larger) for index in range(tasks)), initial=0)
    return [order[start:end] for start, end in pairwise(ends)]


def _repeated(dataset: Dataset, tasks: int) -> list[list[int]]:
    _check_count(tasks)
    return [list(range(dataset.classes)) for _ in range(tasks)]


def _check_count(tasks: int) -> None:
    if tasks < 1:
        raise InputError(f"tasks is {tasks}: give at least 1")
