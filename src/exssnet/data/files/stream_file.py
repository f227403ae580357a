"""A stream of a user's own data: a YAML file that lists tasks, their files and columns.

    name: support
    tasks:
      - {name: tickets, train: tickets.csv, text: body, label: team}
      - {name: reviews, train: reviews.jsonl, test: newer.jsonl, text: [title, review], label: stars}

Texts name their columns (`text`, or `pair` for two texts that are read as a pair). Tasks without either are folders of
images, tables or arrays, as `exssnet learn` reads them. Paths are relative to the file. Where a task has no test file,
a share of each class is held out for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from exssnet.data.dataset import digest_of
from exssnet.data.files.labelled import Labelled, hold_out, read_labelled, scaling
from exssnet.data.files.texts import Columns, read_texts
from exssnet.data.streams import Holdout, rows_by_class
from exssnet.data.tasks import Stream, Task, check
from exssnet.data.tensors import TensorSplit
from exssnet.data.text.stream import TextStream, TextTask
from exssnet.data.text.texts import Sample, Texts
from exssnet.data.transforms import Normalize
from exssnet.encoders.base import Encoder
from exssnet.errors import DataError, InputError, ParseError
from exssnet.io import parse
from exssnet.io.parse import Between, Length, Matching

NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
Name = Annotated[str, Matching(NAME, "a name of letters, digits, points, + and -")]
File = Annotated[str, Length(1, 4096)]
Share = Annotated[float, Between(0.01, 0.9)]
Words = Annotated[tuple[Annotated[str, Length(1, 1000)], ...], Length(1, 100)]
HELD_OUT = 0.2  # of each class, for a test part that is not given


@dataclass(frozen=True)
class Entry:
    """One task as the file has it."""

    name: Name
    train: File
    test: File | Share | None = None  # a file, or a share of each class of `train`
    validation: File | None = None
    text: Annotated[str, Length(1, 1000)] | Words | None = None
    pair: Words | None = None
    label: Annotated[str, Length(1, 1000)] | None = None
    labels: File | None = None  # next to a .npy


@dataclass(frozen=True)
class StreamFile:
    """The file, as it is read."""

    tasks: Annotated[tuple[Entry, ...], Length(1, 10_000)]
    name: Name | None = None
    classes: Literal["own", "shared"] = "own"  # shared: classes of one name are one class, in whichever task
    shape: tuple[int, ...] | None = None  # of images: channels, height, width

    @property
    def is_text(self) -> bool:
        return self.tasks[0].text is not None or self.tasks[0].pair is not None


def read_stream_file(path: Path) -> StreamFile:
    """The file, checked as far as it can be without its data."""
    try:
        found = parse.yaml_file(path, StreamFile)
    except ParseError as error:
        raise InputError(f"{error} (a stream's file lists its tasks)") from error
    kinds = {entry.text is not None or entry.pair is not None for entry in found.tasks}
    if len(kinds) > 1:
        raise InputError(f"{path}: some tasks have text and others do not: one stream has one kind of data")
    names = [entry.name for entry in found.tasks]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"{path}: two tasks are called '{twice[0]}': give each its own name")
    for entry in found.tasks:
        if entry.text is not None and entry.pair is not None:
            raise InputError(f"{path}: task '{entry.name}' has both text and pair: give one of them")
        if found.is_text and entry.label is None:
            raise InputError(f"{path}: task '{entry.name}' names no label column: add `label: COLUMN`")
    return found


def stream_of(
    path: Path, encoder: Callable[[], Encoder], tasks: int, sample: int | None, validation: float, seed: int
) -> Stream:
    """The first tasks of a file; `sample` training rows a class, and a share of each class held out."""
    found = read_stream_file(path)
    chosen, name = found.tasks[:tasks], found.name or path.stem
    if found.is_text:
        made = [_text_task(path, entry, Sample(sample, sample, validation)) for entry in chosen]
        numbers = _numbers([names for _, names in made], found.classes == "shared")
        whole = [
            TextTask(entry.name, tuple(names), own, *parts)
            for entry, (parts, names), own in zip(chosen, made, numbers, strict=True)
        ]
        return TextStream(name, tuple(whole), encoder())
    return ArrayStream(name, path, found, tasks, Holdout(validation, sample, seed))


class ArrayStream(Stream):
    """Images, tables or arrays of a user's own; each task is scaled by its own training part."""

    def __init__(self, name: str, path: Path, found: StreamFile, tasks: int, holdout: Holdout) -> None:
        self.name, self._holdout = name, holdout
        self._names = [entry.name for entry in found.tasks[:tasks]]
        self._parts = [_arrays(path, entry, found.shape) for entry in found.tasks[:tasks]]
        shapes = {tuple(parts["train"].inputs.shape[1:]) for parts in self._parts}
        if len(shapes) > 1:
            listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise DataError(f"{path}: tasks have inputs of shapes {listed}: all tasks of a stream share one network")
        self.input_shape = shapes.pop()
        numbers = _numbers([parts["train"].classes for parts in self._parts], found.classes == "shared")
        self.class_order = [list(own) for own in numbers]
        self.max_classes = max(map(len, self.class_order))
        self.data_digests = {
            f"{task} {part}": digest_of(one.inputs, one.labels)
            for task, parts in zip(self._names, self._parts, strict=True)
            for part, one in parts.items()
        }

    def __len__(self) -> int:
        return len(self._parts)

    def task_name(self, index: int) -> str:
        return self._names[index]

    def task(self, index: int) -> Task:
        parts, name = self._parts[index], self._names[index]
        classes = len(parts["train"].classes)
        scale = _normalize(parts["train"].inputs)
        splits = {part: TensorSplit(one.inputs, one.labels, normalize=scale) for part, one in parts.items()}
        cuts = [
            self._holdout.cut(rows, label)
            for label, rows in enumerate(rows_by_class(parts["train"].labels, classes))
            if len(rows)
        ]
        kept, held = (torch.cat([cut[part] for cut in cuts]) for part in (0, 1))
        if "validation" in parts:
            kept, held = torch.cat([kept, held]), torch.arange(len(parts["validation"].labels))
        source = splits.get("validation", splits["train"])
        train = splits["train"].select(kept, parts["train"].labels[kept], classes)
        test = splits["test"].select(torch.arange(len(parts["test"].labels)), parts["test"].labels, classes)
        validation = source.select(held, source.labels[held], classes) if len(held) else None
        check(train, f"train split of task {name}")
        check(test, f"test split of task {name}")
        return Task(index, name, tuple(self.class_order[index]), train, test, validation)


def _text_task(path: Path, entry: Entry, sample: Sample) -> tuple[tuple[Texts, Texts, Texts | None], list[str]]:
    """Train, test and validation part, and the classes of the training part."""
    columns = Columns((entry.text,) if isinstance(entry.text, str) else entry.text or entry.pair or (), entry.label,
                      entry.pair is not None)  # fmt: skip
    train, classes = read_texts(_next_to(path, entry.train), columns)
    if isinstance(entry.test, str):
        test, _ = read_texts(_next_to(path, entry.test), columns, classes)
    else:
        rest, held = hold_out(train.labels, entry.test or HELD_OUT, 0)
        train, test = train.select(rest), train.select(held)
    if entry.validation is not None:
        validation, _ = read_texts(_next_to(path, entry.validation), columns, classes)
        kept, _ = Sample(sample.most, seed=sample.seed).cut(train, len(classes), entry.name)
        return (kept, test, validation), classes
    kept, held_out = sample.cut(train, len(classes), entry.name)
    return (kept, test, held_out), classes


def _arrays(path: Path, entry: Entry, shape: tuple[int, ...] | None) -> dict[str, Labelled]:
    """The parts of a task of images, tables or arrays."""

    def read(file: str, like: Labelled | None = None) -> Labelled:
        labels = None if entry.labels is None or like is not None else _next_to(path, entry.labels)
        known: dict[str, Any] = {} if like is None else {"classes": like.classes, "recipe": like.recipe}
        return read_labelled(_next_to(path, file), shape, entry.label, labels, **known)

    train = read(entry.train)
    parts = {"train": train}
    if entry.validation is not None:
        parts["validation"] = read(entry.validation, train)
    if isinstance(entry.test, str):
        return parts | {"test": read(entry.test, train)}
    rest, held = hold_out(train.labels, entry.test or HELD_OUT, 0)
    return parts | {"train": _rows(train, rest), "test": _rows(train, held)}


def _rows(found: Labelled, rows: Tensor) -> Labelled:
    return Labelled(found.inputs[rows], found.labels[rows], found.classes, found.recipe, found.path, found.second)


def _normalize(inputs: Tensor) -> Normalize | None:
    found = scaling(inputs)
    if not found:
        return None
    mean, std = (torch.tensor(found[key], dtype=torch.float32) for key in ("mean", "std"))
    if len(mean) > 1:
        mean, std = (value.view(-1, *[1] * (inputs.ndim - 2)) for value in (mean, std))
    return Normalize(found.get("scale", 1.0), mean, std)


def _numbers(classes: Sequence[Sequence[str]], shared: bool) -> list[tuple[int, ...]]:
    """The stream's own number of each class of each task."""
    known: dict[tuple[int, str], int] = {}
    return [
        tuple(known.setdefault((0 if shared else task, name), len(known)) for name in names)
        for task, names in enumerate(classes)
    ]


def _next_to(path: Path, file: str) -> Path:
    return path.parent / Path(file).expanduser()
