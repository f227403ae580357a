"""Whether two modules compute the same: what they are built of, attribute by attribute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
HOOKS = tuple(name for name, held in vars(nn.Module()).items() if "hooks" in name and isinstance(held, dict))


def described(module: nn.Module) -> str | None:
    """A digest of a module's structure; None where it holds something whose meaning is not known."""
    try:
        return hashlib.sha256(repr(_content(module)).encode()).hexdigest()
    except TypeError:
        return None


def _content(value: Any) -> Any:
    if isinstance(value, nn.Module):
        if any(getattr(value, name) for name in HOOKS):
            raise TypeError("a hook may do anything")
        kind = type(value)
        return kind.__module__, kind.__qualname__, id(kind), _content(vars(value))
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), value.requires_grad, isinstance(value, nn.Parameter)
    if isinstance(value, SIMPLE):
        return repr(value)
    if isinstance(value, Mapping):
        return [(_content(key), _content(held)) for key, held in value.items()]
    if isinstance(value, list | tuple):
        return [_content(held) for held in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_content(held)) for held in value)
    raise TypeError(f"nothing is known of a {type(value).__name__}")
