"""Changes to a network's tasks other than learning: take one out, take one over, store all and restore them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exssnet.core.network import LearnedTask, MaskedNetwork


def remove(network: MaskedNetwork, task: str, first: Tensor) -> None:
    """Take a task out. Weights that no other task reads get their first values back and are free again."""
    with network.lock:
        mask = network.mask(task)
        network.bank.remove(network.position(task))
        del network.tasks[task]
        alone = mask & ~_read(network)
        network.weights[alone] = first.to(network.weights)[alone]
        network.verify().require()
        network.proof.accept()


def _read(network: MaskedNetwork) -> Tensor:
    """The shared weights that some task computes with: those of all masks, without what a task overrides."""
    read = torch.zeros_like(network.bank.used)
    for index, learned in enumerate(network.tasks.values()):
        mask = network.bank.mask(index)
        if learned.override is not None:
            mask[learned.override[0]] = False
        read |= mask
    return read


def adopt(
    network: MaskedNetwork, card: Mapping[str, Any], mask: Tensor, masked: Tensor, private: Mapping[str, Tensor]
) -> LearnedTask:
    """Add a task that was learned on another network with the same first weights; `masked` are its weights.

    Where a weight of its mask is free here it becomes the task's own. Where it is another task's and has another value
    here, the task overrides it.
    """
    with network.lock:
        network.check_new(card["name"], card["classes"])
        mask, masked = mask.to(network.device), masked.to(network.weights)
        free = network.bank.free(mask)
        network.weights[free] = masked[free]
        differs = (mask & (network.weights != masked)).nonzero().view(-1)
        override = (differs, masked[differs]) if len(differs) else None
        own = {name: tensor.to(network.device) for name, tensor in private.items()}
        learned = LearnedTask(**card, private=own, override=override)
        learned.overlap, learned.trained_weights = network.bank.overlap(mask), int(free.count_nonzero())
        network.bank.add(mask)
        network.tasks[learned.name] = learned
        learned.kept = network.proof.stored_digest(learned)
        network.verify().require()
        network.proof.accept()
        return learned


def state(network: MaskedNetwork) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """All that learning has changed: tensors by name, and the tasks' cards (JSON)."""
    tensors = {"weights": network.weights}
    for index, learned in enumerate(network.tasks.values()):
        tensors[f"task.{index}.mask"] = network.bank.packed(index)
        tensors |= {f"task.{index}.private.{name}": tensor for name, tensor in learned.private.items()}
        if learned.override is not None:
            tensors |= {f"task.{index}.apart.{i}": tensor for i, tensor in enumerate(learned.override)}
    return tensors, [learned.card() for learned in network.tasks.values()]


def load_state(network: MaskedNetwork, tensors: Mapping[str, Tensor], cards: list[dict[str, Any]]) -> None:
    """Restore what `state` gave, on a network built the same way. The caller verifies it."""
    with network.lock:
        device = network.device
        network.cache.clear()
        network.weights = tensors["weights"].to(device).clone()
        network.bank.load([tensors[f"task.{index}.mask"] for index in range(len(cards))])
        network.tasks = {}
        own: dict[str, dict[str, Tensor]] = defaultdict(dict)  # sorted once: there may be thousands
        for name, tensor in tensors.items():
            task, _, short = name.partition(".private.")
            own[task][short] = tensor.to(device)
        for index, card in enumerate(cards):
            positions, values = (tensors.get(f"task.{index}.apart.{i}") for i in (0, 1))
            override = None if positions is None or values is None else (positions.to(device), values.to(device))
            network.tasks[card["name"]] = LearnedTask(**card, private=own[f"task.{index}"], override=override)
        network.proof.restart()
