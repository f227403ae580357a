"""The manifest: the list of all other files of a model directory.

It ends with its own digest, and a state has one spelling only, so that any changed byte is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exssnet.errors import StoreError
from exssnet.io.typed import line
from exssnet.version import __version__

FORMAT = 1
AUTO = "auto"  # means that the task is found, so it cannot be the name of a task
MOST_LETTERS = 1000  # of a name; earlier versions had no limit


@dataclass(frozen=True)
class File:
    """A file of the directory, named after its content."""

    name: str
    sha256: str
    size: int

    @classmethod
    def of(cls, content: bytes, ending: str) -> File:
        digest = hashlib.sha256(content).hexdigest()
        return cls(f"{digest[:32]}.{ending}", digest, len(content))

    @classmethod
    def from_json(cls, found: Any) -> File:
        """Parse a file entry; its name is checked, because it must not lead out of the directory."""
        file = cls(_typed(found["name"], str), _typed(found["sha256"], str), _typed(found["size"], int))
        stem, _, ending = file.name.partition(".")
        if len(file.sha256) != 64 or stem != file.sha256[:32] or ending not in ("json", "safetensors"):
            raise ValueError(f"file name {file.name!r}")
        if not set(file.sha256) <= set("0123456789abcdef"):
            raise ValueError(f"digest {file.sha256!r}")
        return file

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "size": self.size}


@dataclass(frozen=True)
class Entry:
    """A task: its card (JSON), its tensors, and the task whose mask is the context of its own."""

    name: str
    card: File
    tensors: File
    predictor: str | None

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name, "card": self.card.json(), "tensors": self.tensors.json(), "predictor": self.predictor,
        }  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The state of a directory after a change, the change, and the previous manifest."""

    base: Mapping[str, Any]  # description of the network and its initial weights
    base_file: File | None  # tensors that do not follow from a seed
    tasks: tuple[Entry, ...]
    change: str  # description: "learn animals"
    time: str  # of the change
    before: File | None  # the previous manifest
    number: int = 0  # of changes so far

    def files(self) -> Iterator[File]:
        """All files it names except the previous manifest."""
        if self.base_file is not None:
            yield self.base_file
        for task in self.tasks:
            yield task.card
            yield task.tensors

    def content(self) -> bytes:
        """The file's bytes."""
        found = {
            "format": FORMAT, "exssnet": __version__, "number": self.number, "change": self.change, "time": self.time,
            "base": dict(self.base), "base_file": self.base_file and self.base_file.json(),
            "tasks": [task.json() for task in self.tasks], "before": self.before and self.before.json(),
        }  # fmt: skip
        return _signed(found)


def _signed(found: dict[str, Any]) -> bytes:
    found = {name: value for name, value in found.items() if name != "sha256"}
    digest = hashlib.sha256(_text(found)).hexdigest()
    return _text(found | {"sha256": digest})


def _text(found: Mapping[str, Any]) -> bytes:
    return (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()


def parse(content: bytes, where: str) -> Manifest:
    """Parse a manifest and check its own digest."""
    try:
        found = json.loads(content)
        made_for, whole = found["format"], _signed(found) == content
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{where} is damaged: {_line(error)}") from error
    if type(made_for) is int and made_for > FORMAT:
        raise StoreError(
            f"{where} has format {made_for}, from exssnet {found.get('exssnet')}; this version reads {FORMAT}: "
            "upgrade exssnet"
        )
    if not whole:
        raise StoreError(f"{where} is damaged: its digest does not match")
    try:
        if _typed(made_for, int) != FORMAT:
            raise ValueError(f"format {made_for}")
        return Manifest(
            _typed(found["base"], dict), _file(found["base_file"]), _entries(found["tasks"]),
            _typed(found["change"], str), _typed(found["time"], str), _file(found["before"]),
            _typed(found["number"], int),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is not a manifest of format {FORMAT}: {_line(error)}") from error


def undone_note(content: bytes) -> bytes:
    """The note for a manifest that was restored: its previous manifest is deleted."""
    return _text({"undone": hashlib.sha256(content).hexdigest()})


def _entries(found: Any) -> tuple[Entry, ...]:
    entries = tuple(
        Entry(
            _typed(task["name"], str), File.from_json(task["card"]), File.from_json(task["tensors"]),
            _typed(task["predictor"], str, type(None)),
        )
        for task in _typed(found, list)
    )  # fmt: skip
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("two tasks have the same name")
    for name in names:
        if not name.isprintable() or len(name) > MOST_LETTERS:
            raise ValueError(f"task {name!r}")
    return entries


def _file(found: Any) -> File | None:
    return None if found is None else File.from_json(found)


def _typed(found: Any, *kinds: type) -> Any:
    if type(found) not in kinds:
        raise TypeError(f"{found!r} where {kinds[0].__name__} was expected")
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__} {line(error)}"
