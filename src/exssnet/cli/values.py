"""Parsers of arguments: the shape of an input, the user's own module, files of several tasks."""

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
    """Parse the shape of an input."""
    if text is None:
        return None
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or prod(found) > MOST_NUMBERS:
        raise InputError(f"--input is '{text}': give comma-separated whole numbers from 1, for example 3,32,32")
    return found


def imported(network: str | None) -> nn.Module | None:
    """Make the user's own module from package.module:function; None for a built-in network."""
    if network is None or ":" not in network:
        return None
    from importlib import import_module

    from torch import nn

    name, _, factory = network.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = getattr(import_module(name), factory)()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"--network {network} failed: {why}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"--network {network} returned a {type(module).__name__}: a torch.nn.Module was expected")
    return module


def pairs(data: list[str]) -> dict[str, Path]:
    """Parse TASK=FILES of every task."""
    found: dict[str, Path] = {}
    for entry in data:
        name, _, files = entry.partition("=")
        if not name or not files:
            raise InputError(f"--data is '{entry}': with --task auto give TASK=FILES, for example animals=animals/")
        if name in found:
            raise InputError(f"--data has task '{name}' twice: give each once")
        found[name] = Path(files)
    return found
