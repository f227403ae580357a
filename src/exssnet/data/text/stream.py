"""Streams of text tasks: each has its own data set, and all go through one frozen encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from exssnet.data.tasks import Stream, Task, check
from exssnet.data.text.states import StatesData
from exssnet.data.text.texts import Texts
from exssnet.encoders.base import Encoder
from exssnet.encoders.progress import tell
from exssnet.encoders.states import state_cache
from exssnet.errors import DataError, InputError


@dataclass(frozen=True)
class TextTask:
    """A task before it is encoded."""

    name: str
    class_names: tuple[str, ...]  # by local label
    numbers: tuple[int, ...]  # the stream's own number of each class; tasks with the same classes share them
    train: Texts
    test: Texts
    validation: Texts | None = None

    def parts(self) -> dict[str, Texts]:
        """Its splits by name."""
        held = {} if self.validation is None else {"validation": self.validation}
        return {"train": self.train, **held, "test": self.test}


@dataclass(eq=False)
class TextStream(Stream):
    """Text tasks in the order they are learned. A task's texts are encoded when it is asked for, once."""

    name: str
    tasks: Sequence[TextTask]
    encoder: Encoder
    encoded: int = 0  # texts that had to go through the encoder, and were not in the cache
    _data: dict[tuple[int, str], StatesData] = field(default_factory=dict)
    _cut: dict[str, int] = field(default_factory=dict)  # by split

    def __post_init__(self) -> None:
        self.input_shape = (self.encoder.limit, self.encoder.width + 1)
        self.class_order = [list(task.numbers) for task in self.tasks]
        self.max_classes = max(map(len, self.class_order))
        splits = {f"{task.name} {part}": texts for task in self.tasks for part, texts in task.parts().items()}
        if len({task.name for task in self.tasks}) < len(self.tasks):
            raise InputError(f"{self.name} has two tasks of one name: give each its own")
        self.sample = any(texts.of is not None for texts in splits.values())
        self.data_digests = {name: _told(texts) for name, texts in splits.items()}
        self.data_digests["encoder"] = f"{self.encoder.digest} ({self.encoder.name})"
        for task in self.tasks:
            if len(torch.unique(task.train.labels)) < 2:
                raise DataError(
                    f"task {task.name} of {self.name} has training examples of fewer than two classes: "
                    f"a task needs at least two to tell apart"
                )

    def __len__(self) -> int:
        return len(self.tasks)

    def task_name(self, index: int) -> str:
        return self.tasks[index].name

    def task(self, index: int) -> Task:
        one = self.tasks[index]
        data = {part: self._part(index, part) for part in one.parts()}
        return Task(index, one.name, one.numbers, data["train"], data["test"], data.get("validation"))

    def text_counts(self) -> dict[str, dict[str, int]]:
        found = {}
        for index, task in enumerate(self.tasks):
            for part, texts in task.parts().items():
                self._part(index, part)
                name = f"{task.name} {part}"
                found[name] = {"texts": len(texts), "empty": texts.empty, "cut": self._cut[name]}
        return found

    def _part(self, index: int, part: str) -> StatesData:
        """A split's examples, encoded when they are first asked for."""
        if (index, part) in self._data:
            return self._data[index, part]
        task = self.tasks[index]
        texts, name = task.parts()[part], f"{task.name} {part}"
        classes, limit = len(task.class_names), self.encoder.limit
        found = state_cache().states(self.encoder, texts.texts, lambda done, total: tell(name, done, total))
        self.encoded += found.encoded
        self._cut[name] = found.cut
        data = StatesData(found, torch.arange(len(texts)), texts.labels, classes, limit)
        check(data, f"{part} split of task {task.name}")
        self._data[index, part] = data
        return data


def _told(texts: Texts) -> str:
    """The digest of a split, and whether it is only a part of the data set's."""
    return texts.digest if texts.of is None else f"{texts.digest} (sample, the data set has {texts.of:,} rows)"
