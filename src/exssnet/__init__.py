"""Continual learning without forgetting: a task is a set of bits over shared weights."""

from exssnet.errors import DataError, ExssnetError, ForgettingError, InputError, RunError, StoreError
from exssnet.version import __version__

__all__ = [
    "DataError",
    "ExssnetError",
    "ForgettingError",
    "InputError",
    "Model",
    "RunError",
    "StoreError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import `Model`, and torch with it, when it is asked for: `exssnet --help` needs neither."""
    if name == "Model":
        from exssnet.model import Model

        return Model
    raise AttributeError(f"module 'exssnet' has no attribute '{name}'")


def __dir__() -> list[str]:
    """With what `__getattr__` gives."""
    return sorted({*globals(), *__all__})
