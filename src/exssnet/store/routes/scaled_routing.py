"""Routing of raw inputs, which every task gets in its own scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.core.routing.rules import Routed, route
from exssnet.core.routing.superposition import Scaling
from exssnet.data.files import labelled as files
from exssnet.data.files.examples import as_inputs

if TYPE_CHECKING:
    from exssnet.store.format.card import Card


def route_among(network: MaskedNetwork, cards: Sequence[Card], raw: Tensor, rule: str, per: str = "row") -> Routed:
    """Route raw inputs among the tasks of the cards."""
    scalings = {card["task"]["name"]: card["scaling"] for card in cards}
    names = list(scalings)

    def seen_by(name: str) -> Tensor:
        return prepared(raw, scalings[name]).to(network.device)

    if raw.dtype == torch.int64 or all(scaling == scalings[names[0]] for scaling in scalings.values()):
        return route(network, seen_by(names[0]), rule, names, per)
    if rule == "confident":  # each task separately, with exactly the inputs of its predictions
        parts = [route(network, seen_by(name), rule, [name], per) for name in names]
        scores = torch.cat([part.scores for part in parts], 1)
        return Routed(tuple(names), scores.argmax(1), scores)
    affine = {name: _affine(scaling, raw, network.weights) for name, scaling in scalings.items()}
    return route(network, raw.to(network.weights), rule, names, per, scalings=affine)


def prepared(inputs: Tensor, scaling: Mapping[str, Any] | None) -> Tensor:
    """Scale inputs for the network; without a scaling as `Model` does."""
    return as_inputs(inputs) if scaling is None else files.scaled(inputs, scaling)


def _affine(scaling: Mapping[str, Any] | None, raw: Tensor, like: Tensor) -> Scaling:
    """A scaling as factor and offset that broadcast with raw inputs."""
    unit = {"scale": 1 / 255} if raw.dtype == torch.uint8 else {}  # as `prepared` without a scaling
    found: dict[str, Any] = {"scale": 1.0, "mean": [0.0], "std": [1.0]} | dict(unit if scaling is None else scaling)
    mean, std = (torch.tensor(found[key], dtype=torch.float64) for key in ("mean", "std"))
    shape = (-1, *[1] * (raw.ndim - 2)) if len(mean) > 1 else (1,)
    return (found["scale"] / std).view(shape).to(like), (-mean / std).view(shape).to(like)
