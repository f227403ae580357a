"""A task's card: what is known of it, as JSON. A reader checks what it needs and leaves alone what it does not know."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from exssnet.core.network import LearnedTask
from exssnet.core.proof import combined_digest
from exssnet.errors import StoreError
from exssnet.store.measured import Measured

Card = dict[str, Any]

# what a card must have, and of which kind; `task` is what the network keeps of it
NEEDED: dict[str, type | tuple[type, ...]] = {
    "task": dict, "labels": list, "recipe": dict, "scaling": (dict, type(None)), "accuracy": (float, int, type(None)),
    "examples": int, "held_out": int, "date": str, "digest": str,
}  # fmt: skip
OF_TASK: dict[str, type | tuple[type, ...]] = {
    "name": str, "classes": int, "lender": (str, type(None)), "overlap": (float, int, type(None)),
    "trained_weights": int, "digests": dict, "kept": str,
}  # fmt: skip
ANSWERS = ("labels", "recipe", "scaling")  # what decides an answer beside the tensors


def parse(content: bytes, where: str) -> Card:
    """The card of these bytes."""
    try:
        card: Card = json.loads(content)
        _check(card, NEEDED)
        _check(card["task"], OF_TASK)
        _check(card["recipe"], {"kind": str, "shape": list})
        if len(card["labels"]) != card["task"]["classes"]:
            raise ValueError("labels")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{where} is no card of a task: {' '.join(str(error).split())}") from error
    return card


def _check(found: Any, needed: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in needed.items():
        if not isinstance(found[name], kind):
            raise TypeError(f"{name} is {found[name]!r}")


def content(card: Mapping[str, Any]) -> bytes:
    """The card's file."""
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def with_task(card: Mapping[str, Any], learned: LearnedTask) -> Card:
    """The card with what the network knows of its task now."""
    known = {
        "name": learned.name, "classes": learned.classes, "lender": learned.lender, "overlap": learned.overlap,
        "trained_weights": learned.trained_weights, "digests": learned.digests, "kept": learned.kept,
    }  # fmt: skip
    return {"task": card.get("task", {}) | known} | {name: value for name, value in card.items() if name != "task"}


def renamed(card: Mapping[str, Any], task: str, name: str) -> Card:
    """The card where a task has another name."""
    own = card["task"] | {key: name for key in ("name", "lender") if card["task"][key] == task}
    measured = Measured.of_card(card)
    routing = {} if measured is None else {"routing": measured.renamed(task, name).json()}
    return dict(card) | {"task": own} | routing


def without(card: Mapping[str, Any], task: str) -> Card:
    """The card where another task has been removed, whose name may be a third one's some day."""
    lender = card["task"]["lender"]
    own = card["task"] | {"lender": None if lender == task else lender}
    measured = Measured.of_card(card)
    left = None if measured is None else measured.without(task)
    return dict(card) | {"task": own} | ({} if measured is None else {"routing": left and left.json()})


def distinct(labels: Sequence[str]) -> list[str]:
    """Names that tell classes apart, also where a card has one twice: the second `cat` is `cat (2)`."""
    if len(set(labels)) == len(labels):
        return list(labels)
    found: list[str] = []
    for label in labels:
        name, times = label, 1
        while name in found:
            times += 1
            name = f"{label} ({times})"
        found.append(name)
    return found


def of_network(card: Mapping[str, Any]) -> Card:
    """What the network is told of the task: all of `task` that this version knows."""
    return {name: card["task"][name] for name in OF_TASK}


def identity(card: Mapping[str, Any]) -> str:
    """A digest of all that decides the task's answers: its tensors, its labels, and how it reads and scales inputs."""
    words = {name: json.dumps(card[name], sort_keys=True, ensure_ascii=False) for name in ANSWERS}
    return combined_digest(
        card["task"]["digests"]
        | {f"card {name}": hashlib.sha256(text.encode()).hexdigest() for name, text in words.items()}
    )
