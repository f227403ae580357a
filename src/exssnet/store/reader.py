"""Reading a model directory: its tasks, and their predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor, nn

from exssnet.core.routing.rules import Routed
from exssnet.data.files import labelled as files
from exssnet.data.files.examples import read_examples
from exssnet.engine.stacked import Stacked
from exssnet.errors import InputError, StoreError
from exssnet.store.baked import baked
from exssnet.store.directory import Folder, Missing
from exssnet.store.format import probe, task_files
from exssnet.store.format.base_file import Base
from exssnet.store.format.card import Card, of_network, parse
from exssnet.store.format.manifest import AUTO, File, Manifest
from exssnet.store.format.stored_task import StoredTask
from exssnet.store.routes.auto import Found, find
from exssnet.store.routes.held_out import HeldOut
from exssnet.store.routes.measured import Measured, takes
from exssnet.store.routes.scaled_routing import prepared, route_among
from exssnet.train.learner import Learner, listed

if TYPE_CHECKING:
    from exssnet.data.files.examples import Array, Examples

CACHE_BYTES = 256 * 2**20  # of the cache of masked weights, so that switching tasks is free

Read = TypeVar("Read")


@dataclass(frozen=True)
class Damage:
    """The first damage in a directory; a task is read through those before it."""

    tasks: tuple[str, ...]  # that cannot be read: the first damaged one and those after it
    file: str
    reason: str


class Reader:
    """The state of a directory when it was opened. Reading needs no lock.

    If a task's file is damaged, tasks before it work; it and those after it raise an error that names the file.
    """

    def __init__(
        self, folder: Folder, module: nn.Module | None, device: str | torch.device | None,
        manifest: Manifest | None = None, base: bytes | None = None,
    ) -> None:  # fmt: skip
        """`manifest` and `base` (the content of its base file) are given for a directory that is not written yet."""
        self._folder, self._module, self._device = folder, module, device
        self._manifest = folder.manifest() if manifest is None else manifest
        self._unwritten, self._base_content = manifest is not None, base
        self._cards: list[Card] | None = None
        self._damage: Damage | None = None
        self._loaded: Learner | None = None
        self._stacked: Stacked | None = None
        self._probed = False  # whether a probe has checked the module
        self._held_out = HeldOut()
        self._lock = RLock()  # several threads may predict while one learns

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    def __repr__(self) -> str:
        network = self._manifest.base.get("network") or "your own network"
        names = listed([entry.name for entry in self._manifest.tasks])
        return f"{type(self).__name__}({str(self.path)!r}, {network}; {names})"

    # --- what it knows -----------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def base(self) -> Base:
        return Base.from_json(self._manifest.base)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def tasks(self) -> tuple[StoredTask, ...]:
        """The learned tasks in order; in a damaged directory those before the damage."""
        with self._lock:
            cards = self.cards  # first, because reading may find a newer state
            return tuple(StoredTask.of(entry, card) for entry, card in zip(self._manifest.tasks, cards, strict=False))

    @property
    def damage(self) -> Damage | None:
        """The damage found so far; `verify` checks everything."""
        return self._damage

    @property
    def cards(self) -> list[Card]:
        """The stored cards; in a damaged directory those before the damage."""
        with self._lock:
            self._look_again()
            if self._cards is None:
                self._cards = self._whole(self._read_cards)
            return self._cards

    def _read_cards(self) -> list[Card]:
        cards = self._until_damaged([entry.card for entry in self._manifest.tasks], parse)
        for position, (entry, card) in enumerate(zip(self._manifest.tasks, cards, strict=False)):
            if card["task"]["name"] != entry.name:
                self._damaged(position, entry.card.name, StoreError(f"{entry.card.name} is the card of another task"))
                return cards[:position]
        return cards

    def _read_tensors(self) -> list[bytes]:
        return self._until_damaged([entry.tensors for entry in self._manifest.tasks], lambda content, _: content)

    def _until_damaged(self, files: Sequence[File], read: Callable[[bytes, str], Read]) -> list[Read]:
        """Read a file of every task, up to the first that cannot be read."""
        found: list[Read] = []
        for file in files:
            try:
                found.append(read(self._folder.read(file), file.name))
            except StoreError as error:
                if isinstance(error, Missing) and self._folder.manifest() != self._manifest:
                    raise  # not damaged, but changed by another process
                self._damaged(len(found), file.name, error)
                break
        return found

    def _damaged(self, position: int, file: str, error: StoreError) -> None:
        lost = tuple(entry.name for entry in self._manifest.tasks[position:])
        if self._damage is None or len(lost) > len(self._damage.tasks):
            self._damage = Damage(lost, file, str(error))

    def _look_again(self) -> None:
        """Forget damage, which may have been repaired since."""
        if self._damage is not None:
            self._cards, self._damage, self._loaded, self._stacked = None, None, None, None

    def task(self, name: str) -> StoredTask:
        with self._lock:
            card = self.card(name)
            return StoredTask.of(self._manifest.tasks[self._position(name)], card)

    def card(self, name: str) -> Card:
        """The stored card of a task."""
        with self._lock:
            cards = self.cards  # first, as above
            position = self._position(name)
            if position >= len(cards):
                self._require(name)
            return cards[position]

    def _require(self, *tasks: str) -> None:
        """Refuse tasks that cannot be read."""
        if self._damage is not None:
            for task in tasks:
                if task in self._damage.tasks:
                    raise StoreError(f"task '{task}' cannot be read: {self._damage.reason}")

    def require_whole(self) -> None:
        """Refuse an operation that needs all tasks if some cannot be read."""
        if self._damage is not None:
            first = self._damage.tasks[0]
            raise StoreError(
                f"{self._damage.reason}, so task '{first}' and those after it cannot be read: restore the file, or "
                f"remove the tasks from the last one down to '{first}'"
            )

    def _position(self, name: str) -> int:
        for position, entry in enumerate(self._manifest.tasks):
            if entry.name == name:
                return position
        known = ", ".join(entry.name for entry in self._manifest.tasks) or "none"
        raise InputError(f"{self.path} has no task '{name}' (it has: {known})")

    @property
    def model(self) -> Learner:
        """The model in memory, read on first use; in a damaged directory with the tasks before the damage."""
        with self._lock:
            model = self.unproved()
            if not self._probed:
                probe.require_one(model.network, self._cards or [], self._module is not None)
                self._probed = True
            return model

    def unproved(self) -> Learner:
        """The model in memory, without checking its probe."""
        with self._lock:
            self._look_again()
            if self._loaded is None:
                self._loaded = self._whole(self._load)
            return self._loaded

    def check_module(self) -> None:
        """Refuse a user's module that does not compute the first task, which is read without the others."""
        if self._module is not None and self._manifest.tasks:
            first = Reader(self._folder, self._module, None, replace(self._manifest, tasks=self._manifest.tasks[:1]))
            first.model  # noqa: B018

    def answering(self, *tasks: str) -> Learner:
        """The model, if these tasks can be read."""
        model = self.model
        self._require(*tasks)
        return model

    def _whole(self, read: Callable[[], Read]) -> Read:
        """Read files of the opened state or, if the directory was changed meanwhile, of the new state."""
        for _ in range(10):
            self._damage = None  # of an outdated state
            try:
                return read()
            except Missing as error:
                now = self._folder.manifest()
                if now == self._manifest:
                    raise
                if self._cards is not None or self._loaded is not None:  # the opened state has been used already
                    raise StoreError(f"{self.path} has changed since it was read: open it again") from error
                self._manifest = now
        raise StoreError(f"{self.path} changes faster than it can be read: try again later")

    def _load(self) -> Learner:
        model = self._without_tasks()
        entries, cards, contents = self._manifest.tasks, self._read_cards(), self._read_tensors()
        readable = min(len(cards), len(contents))
        coded = [(content, entry.predictor) for content, entry in zip(contents, entries, strict=False)][:readable]
        stopped = task_files.read(model.network, coded, [of_network(card) for card in cards[:readable]])
        if stopped is not None:
            position = len(model.network.tasks)
            self._damaged(position, entries[position].tensors.name, stopped)
        self._cards = cards
        model.network.cache.bytes = CACHE_BYTES
        if self._device is not None:
            model.to(self._device)
        return model

    def _without_tasks(self) -> Learner:
        file = self._manifest.base_file
        if file is None:
            return self.base.model(self._module)
        return self.base.model(self._module, load(self._base_content or self._folder.read(file)))

    def _first(self) -> Tensor:
        """The first weights."""
        return self._without_tasks().network.weights

    # --- asking ------------------------------------------------------------------------------------------------

    def probabilities(self, x: Array, task: str) -> Tensor:
        """Logits [N, classes] for inputs as given to `learn`: raw pixels, unscaled columns."""
        return self.answering(task).probabilities(self._inputs(x, task), task)

    @overload
    def predict(  # type: ignore[overload-overlap]  # "auto" is a text like any other to mypy
        self, x: Array, task: Literal["auto"], *, rule: str = "confident", threshold: float | None = None
    ) -> Found: ...
    @overload
    def predict(self, x: Array, task: str | None = None, *, tasks: Sequence[str] | None = None) -> Tensor: ...
    def predict(
        self, x: Array, task: str | None = None, *, tasks: Sequence[str] | None = None, rule: str = "confident",
        threshold: float | None = None,
    ) -> Tensor | Found:  # fmt: skip
        """Predict the class of each input [N], from 0 within its task; `tasks` has a task for every row.

        With the task "auto" the rule finds the task of each input: see `Found`. A task whose probability is below the
        threshold is unknown; the default threshold was measured when a task was learned. A batch of several tasks is
        computed at once if that is faster (`engine/stacked.py`).
        """
        if (task is None) == (tasks is None):
            raise InputError("give either task, or tasks with one for every row")
        if task == AUTO:
            return find(self, x, rule, threshold)
        if task is not None:
            return self.probabilities(x, task).argmax(1)
        assert tasks is not None
        if len(tasks) != len(x):
            raise InputError(f"there are {len(tasks)} tasks for {len(x)} inputs: give one for every row")
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(tasks):
            rows.setdefault(name, []).append(row)
        inputs, network = self._rows(x, rows), self.answering(*rows).network
        with self._lock:
            if self._stacked is None or self._stacked.network is not network:
                self._stacked = Stacked(network)
            stacked = self._stacked
        return stacked.classes(inputs, rows).cpu()

    def _rows(self, x: Array, rows: Mapping[str, list[int]]) -> Tensor:
        """Scale raw inputs, each as its task does."""
        ways: list[tuple[Any, list[int]]] = []  # usually one
        for name, positions in rows.items():
            scaling = self.card(name)["scaling"]
            known = next((found for way, found in ways if way == scaling), None)
            if known is None:
                ways.append((scaling, list(positions)))
            else:
                known += positions
        raw = checked(x)
        if len(ways) == 1:
            return prepared(raw, ways[0][0])
        scaled = [(positions, prepared(raw[positions], scaling)) for scaling, positions in ways]
        inputs = raw.new_empty(raw.shape, dtype=scaled[0][1].dtype)
        for positions, part in scaled:
            inputs[positions] = part
        return inputs

    def evaluate(
        self, data: str | Path | Examples, task: str, *, label: str | None = None, labels: str | Path | None = None
    ) -> float:
        """Measure the accuracy in percent on labelled examples, from files or in memory."""
        inputs, numbers = self.examples(data, task, label, labels)
        return self.answering(task).evaluate((self._inputs(inputs, task), numbers), task)

    def examples(
        self, data: str | Path | Examples, task: str, label: str | None = None, labels: str | Path | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read raw inputs and labels of a task's examples; the label column of a table is the learned one."""
        if not isinstance(data, str | Path):
            return read_examples(data)
        card, second = self.card(task), None if labels is None else Path(labels)
        if label is None and Path(data).suffix.lower() in files.TABLES:
            label = card.get("label")
        recipe, known = card["recipe"], list(card["labels"])
        found = files.read_labelled(Path(data), tuple(recipe["shape"]), label, second, known, recipe=recipe)
        return found.inputs, found.labels

    def route(self, x: Array, rule: str = "confident", per: str = "row") -> Routed:
        """Find the task of raw inputs."""
        network = self.model.network
        self.require_whole()  # it could be a task that cannot be read
        if not self.cards:
            raise InputError(f"{self.path} has no tasks: learn one first")
        if len({takes(card["recipe"]) for card in self.cards}) > 1:
            raise InputError("the tasks have different kinds of input: name the task")
        return route_among(network, self.cards, checked(x), rule, per)

    @property
    def measured(self) -> Measured | None:
        """The last measurement of routing; None if there is none."""
        for card in reversed(self.cards):
            if (found := Measured.of_card(card)) is not None:
                return found
        return None

    def found_shares(self) -> dict[str, float]:
        """By task the fraction of its held-out inputs that were routed to it, as last measured."""
        shares: dict[str, float] = {}
        for card in self.cards:
            if (measured := Measured.of_card(card)) is not None:
                shares |= {task: measured.share(task) for task in measured.found}
        return shares

    def bake(self, task: str) -> nn.Sequential:
        """Make an ordinary torch module from raw inputs, as `predict` takes them, to logits; see `store/baked.py`."""
        return baked(self.answering(task).bake(task), self.card(task), self.base.network is not None)

    def _inputs(self, x: Array, task: str) -> Tensor:
        return prepared(checked(x), self.card(task)["scaling"])


def checked(x: Array) -> Tensor:
    """Check raw inputs [N, ...]: finite, of a known number type."""
    if not isinstance(x, Tensor):
        x = np.asarray(x)
    return read_examples((x, torch.zeros(len(x) if x.ndim else 0, dtype=torch.int64)))[0]
