"""What the text of an argument stands for: an input's shape, a module of the user's own, the files of several tasks."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from exssnet.errors import InputError

if TYPE_CHECKING:
    from torch import nn

MOST_NUMBERS = 10**8  # of one example


def numbers(text: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between them: the shape of an input."""
    if text is None:
        return None
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or prod(found) > MOST_NUMBERS:
        raise InputError(f"input is '{text}': give whole numbers from 1 with commas, for example 3,32,32")
    return found


def imported(network: str | None) -> nn.Module | None:
    """The user's own module, if they name one: package.module:factory."""
    if network is None or ":" not in network:
        return None
    from importlib import import_module

    from torch import nn

    place, _, factory = network.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = getattr(import_module(place), factory)()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"network {network} cannot be made: {why}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"network {network} gives a {type(module).__name__}: it must give a torch.nn.Module")
    return module


def pairs(data: list[str]) -> dict[str, Path]:
    """TASK=FILES of every task."""
    found: dict[str, Path] = {}
    for entry in data:
        name, _, files = entry.partition("=")
        if not name or not files:
            raise InputError(f"--data {entry}: with --task auto write TASK=FILES, for example animals=animals/")
        if name in found:
            raise InputError(f"--data names task '{name}' twice: give each once")
        found[name] = Path(files)
    return found
