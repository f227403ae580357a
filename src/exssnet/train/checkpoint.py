"""A checkpoint is one safetensors file: tensors by name and JSON in its header, replaced atomically.

Its header has the SHA-256 of the whole file, taken with zeros in the position of the digest: a run that resumed from a
file with one changed bit would end in another record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from exssnet.errors import RunError
from exssnet.io.disk import write_atomic
from exssnet.io.parse import read_safetensors

MOST_BYTES = 2**40
DIGEST = b'"sha256":"'  # as it is in the header; what else is there has its quotes escaped
ZEROS = b"0" * 64


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
    told = {"facts": json.dumps(facts), "same": json.dumps(same), "sha256": ZEROS.decode()}
    content = bytearray(save(plain, told))
    start = content.index(DIGEST, 8) + len(DIGEST)
    content[start : start + len(ZEROS)] = hashlib.sha256(content).hexdigest().encode()
    write_atomic(path, content)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a checkpoint, if it is to the bit what was written."""
    try:
        content = bytearray(read_safetensors(path, MOST_BYTES))
        _check(content)
        told = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        facts: dict[str, Any] = json.loads(told["facts"])
        same: dict[str, str] = json.loads(told["same"])
        tensors = load(bytes(content))
        return tensors | {name: tensors[known] for name, known in same.items()}, facts
    except Exception as error:
        why = " ".join(str(error).split())
        raise RunError(f"{path} is not a whole checkpoint ({why}): delete it, and the run starts again") from error


def _check(content: bytearray) -> None:
    """Refuse what does not have its own digest; leaves zeros in its position."""
    start = content.find(DIGEST) + len(DIGEST)
    if start < len(DIGEST):
        raise RunError("it has no digest: an earlier version wrote it")
    digest = content[start : start + len(ZEROS)].decode(errors="replace")
    content[start : start + len(ZEROS)] = ZEROS
    if hashlib.sha256(content).hexdigest() != digest:
        raise RunError("it does not have its digest")


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
