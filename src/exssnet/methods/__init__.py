"""One file per method; a class in this folder with a `name` is a method, nothing else registers it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

from exssnet.errors import unknown
from exssnet.methods.base import Batch, Method, Phase

__all__ = ["Batch", "Method", "Phase", "describe", "methods", "parse"]

KKT = "+kkt"


@cache
def methods() -> dict[str, type[Method]]:
    """Every method by name."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        for _, thing in inspect.getmembers(importlib.import_module(f"{__name__}.{module.name}"), inspect.isclass):
            if issubclass(thing, Method) and "name" in vars(thing):
                found[thing.name] = thing
    return dict(sorted(found.items()))


def parse(name: str) -> tuple[type[Method], bool]:
    """The method of a name such as `exssnet` or `exssnet+kkt`, and whether it transfers with KKT."""
    base = name.removesuffix(KKT)
    if base not in methods():
        raise unknown("method", name, [*methods(), *(m + KKT for m in methods() if transfers(m))])
    if name != base and not transfers(base):
        raise unknown("method", name, methods())
    return methods()[base], name != base


def transfers(name: str) -> bool:
    """Whether a method can start a task from an earlier one's mask."""
    return hasattr(methods()[name].settings_type, "kkt")


def describe() -> dict[str, str]:
    """One line on each method, by name."""
    return {name: (inspect.getdoc(kind) or "").partition("\n")[0] for name, kind in methods().items()}
