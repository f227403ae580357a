"""The manifest: the one file that says what a model directory holds. Everything else is a file that it names.

It ends with a digest of itself, and is always written in the same words, so that any changed byte is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exssnet.errors import StoreError
from exssnet.version import __version__

FORMAT = 1


@dataclass(frozen=True)
class File:
    """A file of the directory: its name is made from its content."""

    name: str
    sha256: str
    size: int

    @classmethod
    def of(cls, content: bytes, ending: str) -> File:
        digest = hashlib.sha256(content).hexdigest()
        return cls(f"{digest[:32]}.{ending}", digest, len(content))

    @classmethod
    def from_json(cls, found: Any) -> File:
        """Checked, since a name from outside must not lead out of the directory."""
        file = cls(str(found["name"]), str(found["sha256"]), int(found["size"]))
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
    """A task: its card (JSON), its tensors, and the task whose mask helps to decode its own."""

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
    """What a directory holds after a change, which change that was, and the manifest before it."""

    base: Mapping[str, Any]  # how the network and its first weights are made
    base_file: File | None  # what of it no seed can make again
    tasks: tuple[Entry, ...]
    change: str  # for people: "learn animals"
    time: str  # of the change
    before: File | None  # the manifest that this one took the place of
    number: int = 0  # of changes so far

    def files(self) -> Iterator[File]:
        """All files it names, but for the manifest before it."""
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
    """The manifest of these bytes, checked against its own digest."""
    try:
        found = json.loads(content)
        made_for = found["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is damaged: {_line(error)}") from error
    if type(made_for) is int and made_for > FORMAT:
        raise StoreError(
            f"{where} has format {made_for}, from exssnet {found.get('exssnet')}; this version reads {FORMAT}: upgrade"
        )
    if _signed(found) != content:
        raise StoreError(f"{where} is damaged: it does not have its own digest")
    try:
        before, base_file = found["before"], found["base_file"]
        entries = tuple(
            Entry(task["name"], File.from_json(task["card"]), File.from_json(task["tensors"]), task["predictor"])
            for task in found["tasks"]
        )
        return Manifest(
            found["base"], base_file and File.from_json(base_file), entries, found["change"], found["time"],
            before and File.from_json(before), found["number"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is not a manifest of format {FORMAT}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())
