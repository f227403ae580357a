"""A task as a file: its coded mask, the weights it was the first to use, its private tensors.

The weights of a network need no other file. A weight belongs to the first task whose mask has it, so reading the tasks
in order finds every value in the file of its owner; weights of no task have their initial values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from exssnet.core import changes
from exssnet.core.bank import pack, unpack
from exssnet.core.network import MaskedNetwork
from exssnet.errors import DataError, StoreError
from exssnet.store.format import codec

PRIVATE = "private."


@dataclass(frozen=True)
class Coded:
    """A task's file, and the task whose mask was the context of its own."""

    content: bytes
    predictor: str | None


def write(network: MaskedNetwork, first: Tensor, start: int, used: Tensor) -> list[Coded]:
    """Write the files of the tasks from `start` on; `used` is the union of earlier masks."""
    used, first, names = used.clone(), first.to(network.device), list(network.tasks)
    coded = []
    for index in range(start, len(names)):
        learned, mask = network.tasks[names[index]], network.bank.mask(index)
        predictor = learned.lender if learned.lender in names[:index] else None
        lender = network.mask(predictor) if predictor is not None else None
        tensors = {f"private.{name}": tensor for name, tensor in learned.private.items()}
        tensors["mask"] = _bytes(codec.encode(mask, used, lender))
        owned = mask & ~used
        values = network.weights[owned]
        if not torch.equal(values, first[owned]):  # a task may have trained none
            tensors["values"] = values
        if learned.override is not None:
            positions = torch.zeros_like(mask)
            positions[learned.override[0]] = True
            tensors |= {"apart": _bytes(codec.encode(positions[mask])), "apart.values": learned.override[1]}
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        coded.append(Coded(save(plain), predictor))
        used |= mask
    return coded


def read(
    network: MaskedNetwork, contents: Sequence[tuple[bytes, str | None]], cards: list[dict[str, Any]]
) -> StoreError | None:
    """Load stored tasks into a network without tasks, up to the first that cannot be read; return the reason."""
    stopped = None
    used = torch.zeros_like(network.bank.used)
    weights = network.weights.clone()
    positions: dict[str, int] = {}
    state: dict[str, Tensor] = {}
    for index, ((content, predictor), card) in enumerate(zip(contents, cards, strict=True)):
        try:
            tensors = load(content)
            lender = None
            if predictor is not None:
                lender = unpack(state[f"task.{positions[predictor]}.mask"], len(used))
            mask = codec.decode(_content(tensors["mask"]), len(used), used, lender)
            owned = mask & ~used
            if "values" in tensors:
                weights[owned] = _numbers(tensors["values"], int(owned.count_nonzero()), weights)
            if "apart" in tensors:
                inside = codec.decode(_content(tensors["apart"]), int(mask.count_nonzero()))
                state[f"task.{index}.apart.0"] = chosen = mask.nonzero().view(-1)[inside]
                state[f"task.{index}.apart.1"] = _numbers(tensors["apart.values"], len(chosen), weights)
            own = {name.removeprefix(PRIVATE): t for name, t in tensors.items() if name.startswith(PRIVATE)}
            if other := unlike(network, own, card["classes"]):
                raise DataError(f"its tensor '{other}' does not match the network")
        except (SafetensorError, DataError, KeyError, RuntimeError) as error:
            stopped, cards = StoreError(f"it is not a task: {' '.join(str(error).split())}"), cards[:index]
            break
        state[f"task.{index}.mask"] = pack(mask)
        state |= {f"task.{index}.{PRIVATE}{name}": tensor for name, tensor in own.items()}
        positions[card["name"]] = index
        used |= mask
    changes.load_state(network, state | {"weights": weights}, cards)
    return stopped


def unlike(network: MaskedNetwork, own: Mapping[str, Tensor], classes: int) -> str | None:
    """The first private tensor that does not match the network or is missing; None if all match.

    It has every private parameter, its head with a row for each class, and those buffers that learning changed.
    """
    head = network.partition.head if network.partition.head_is_private else None
    wanted = {
        name: (classes, *tensor.shape[1:]) if name.rpartition(".")[0] == head else tuple(tensor.shape)
        for name, tensor in network.private_start.items()
    }
    kinds = {name: tensor.dtype for name, tensor in (network.private_start | network.buffers).items()}
    shapes = wanted | {name: tuple(tensor.shape) for name, tensor in network.buffers.items()}
    for name, tensor in own.items():
        if tuple(tensor.shape) != shapes.get(name) or tensor.dtype != kinds[name]:
            return name
    return min(wanted.keys() - own.keys(), default=None)


def _numbers(values: Tensor, count: int, like: Tensor) -> Tensor:
    """Check the number and type of stored weights."""
    if values.shape != (count,) or values.dtype != like.dtype:
        raise DataError(f"it has {values.dtype} {list(values.shape)} for {count} weights in {like.dtype}")
    return values.to(like.device)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _content(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise DataError(f"a coded mask is {tensor.dtype} {list(tensor.shape)}, not bytes")
    content: bytes = tensor.numpy().tobytes()
    return content
