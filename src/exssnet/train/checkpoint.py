"""A checkpoint is one safetensors file: tensors by name and JSON in its header, replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from exssnet.disk import write_whole
from exssnet.errors import RunError


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Put a checkpoint in place of the one before; a reader sees the old one or the new one, never a part."""
    plain: dict[str, Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}  # a tensor under a second name is not written twice
    for name, tensor in tensors.items():
        known = first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
        if known != name and tensor.numel():
            same[name] = known
        else:
            plain[name] = tensor.detach().cpu().contiguous()
    write_whole(path, save(plain, {"facts": json.dumps(facts), "same": json.dumps(same)}))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            same: dict[str, str] = json.loads(file.metadata()["same"])
            return tensors | {name: tensors[known] for name, known in same.items()}, facts
    except Exception as error:
        raise RunError(f"{path} is no readable checkpoint ({error}): delete it to start the run anew") from error


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
