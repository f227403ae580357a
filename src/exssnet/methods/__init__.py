"""One file per method; a class with a `name` is a method, nothing else registers it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
from functools import cache
from pathlib import Path

from exssnet.errors import InputError, unknown
from exssnet.methods.base import Batch, Method, Phase

__all__ = ["Batch", "Method", "Phase", "describe", "general", "methods", "parse", "plug_in", "plugged_from"]

KKT = "+kkt"


def methods() -> dict[str, type[Method]]:
    """Every method by name: those of the families below this folder, and those of files that were plugged in."""
    return dict(sorted((_built_in() | _plugged).items()))


def general() -> dict[str, type[Method]]:
    """Every method that learns any data; the others need texts and train their encoder."""
    return {name: kind for name, kind in methods().items() if not kind.trains_encoder}


_plugged: dict[str, type[Method]] = {}
_code: dict[str, str] = {}


@cache
def _built_in() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        found |= _methods_of(importlib.import_module(module.name))
    return found


def _methods_of(module: object) -> dict[str, type[Method]]:
    classes = [thing for _, thing in inspect.getmembers(module, inspect.isclass)]
    return {kind.name: kind for kind in classes if issubclass(kind, Method) and "name" in vars(kind)}


def plug_in(file: Path) -> None:
    """Run a Python file and take its methods in."""
    spec = importlib.util.spec_from_file_location(f"exssnet_plugin_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise InputError(f"plugin {file} is not there, or no Python file: give one such as method.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"plugin {file} cannot be run: {type(error).__name__}: {error}") from error
    found = {name: kind for name, kind in _methods_of(module).items() if kind.__module__ == module.__name__}
    if not found:
        raise InputError(f"plugin {file} has no method in it: a method is a subclass of Method with a name")
    twice = found.keys() & _built_in().keys()
    if twice:
        raise InputError(f"plugin {file} has a method '{min(twice)}', which there is already: choose another name")
    _plugged.update(found)
    _code.update(dict.fromkeys(found, hashlib.sha256(file.read_bytes()).hexdigest()))


def plugged_from(kind: type[Method]) -> str | None:
    """The SHA-256 of the file that a method was plugged in from; None of a built-in one."""
    return _code.get(kind.name)


def parse(name: str) -> tuple[type[Method], bool]:
    """The method of a name such as `exssnet` or `exssnet+kkt`, and whether it transfers with KKT."""
    base = name.removesuffix(KKT)
    if base not in methods():
        raise unknown("method", name, [*methods(), *(m + KKT for m in methods() if transfers(m))])
    if name != base and not transfers(base):
        raise InputError(f"method '{base}' has no KKT: it keeps no masks that another task could start from")
    return methods()[base], name != base


def transfers(name: str) -> bool:
    """Whether a method can start a task from an earlier one's mask."""
    return hasattr(methods()[name].settings_type, "kkt")


def describe() -> dict[str, str]:
    """One line on each method, by name."""
    return {name: (inspect.getdoc(kind) or "").partition("\n")[0] for name, kind in methods().items()}
