"""A change of a model directory: the state, and its commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exssnet.errors import StoreError
from exssnet.store.format import task_files
from exssnet.store.format.card import Card, content
from exssnet.store.format.manifest import Entry
from exssnet.store.writer import Writer, writing
from exssnet.train.learner import Learner

if TYPE_CHECKING:
    from exssnet.store.stored_model import StoredModel


class Change:
    """The state that is changed while the directory is locked."""

    def __init__(self, stored: StoredModel) -> None:
        self._stored = stored
        self._lock = writing(stored._folder)
        self._writer: Writer

    def __enter__(self) -> Change:
        self._writer = self._lock.__enter__()
        try:
            if self._stored._unwritten:
                if self._stored._folder.exists():
                    raise StoreError(f"{self._stored.path} is already a model directory: open it")
                return self
            now = self._writer.manifest
            if now is None:
                raise StoreError(f"{self._stored.path} is no longer a model directory: it has no manifest.json")
            if now != self._stored._manifest:  # changed since it was opened
                self._stored._forget(now)
        except BaseException as error:
            self._lock.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is not None:
            self._stored._forget(self._stored._manifest)  # the state in memory may be changed in part
        return self._lock.__exit__(*error)

    def spend_way_back(self) -> None:
        """Allow this change to delete the previous state on a full disk."""
        self._writer.spend_way_back()

    @property
    def undoable(self) -> bool:
        """Whether the change that was committed can be undone."""
        return self._stored._manifest.before is not None

    @property
    def model(self) -> Learner:
        model = self._stored.model
        self._stored.require_whole()
        return model

    def entry(self, card: Mapping[str, Any], coded: task_files.Coded) -> Entry:
        tensors = self._writer.put(coded.content, "safetensors")
        return Entry(card["task"]["name"], self._writer.put(content(card), "json"), tensors, coded.predictor)

    def with_card(self, entry: Entry, card: Mapping[str, Any]) -> Entry:
        return replace(entry, name=card["task"]["name"], card=self._writer.put(content(card), "json"))

    def add(self, what: str, card: dict[str, Any], coded: task_files.Coded) -> None:
        """Commit one more task without reading the other cards again."""
        cards = [*self._stored.cards, card]
        self.commit(what, [*self._stored._manifest.tasks, self.entry(card, coded)], cards)

    def commit(self, what: str, entries: Sequence[Entry], cards: list[Card] | None = None) -> None:
        """Commit on disk and update this object; `cards` if all of them are known."""
        manifest = replace(self._stored._manifest, tasks=tuple(entries), change=what)
        loaded = self._stored._loaded
        if self._stored._base_content is not None:
            self._writer.put(self._stored._base_content, "safetensors")
        manifest = self._writer.commit(manifest)
        with self._stored._lock:
            self._stored._forget(manifest)
            self._stored._unwritten, self._stored._base_content, self._stored._cards = False, None, cards
            if loaded is not None and list(loaded.network.tasks) == [entry.name for entry in entries]:
                self._stored._loaded = loaded  # the change was made in memory too
