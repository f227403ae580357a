"""KKT: a k-nearest-neighbour test picks the earlier task whose mask starts the new one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exssnet.core.engine import EVALUATED
from exssnet.core.layout import Layout
from exssnet.core.network import MaskedNetwork

FIT_PERCENT = 66
CHUNK = {"cpu": 64, "cuda": EVALUATED}  # inputs run through a subnetwork at once


@dataclass(frozen=True)
class Transfer:
    """The outcome of the test: who lends (None if nobody beats chance), and every candidate's accuracy."""

    lender: str | None
    accuracies: dict[str, float]


def find_lender(network: MaskedNetwork, x: Tensor, y: Tensor, classes: int, neighbours: int = 10) -> Transfer:
    """Score each earlier task's features on one sample of the new task; the best lends if it beats chance."""
    found = [_accuracy(_features(network, x, task), y, classes, neighbours) for task in network.tasks]
    accuracies = dict(zip(network.tasks, torch.stack(found).tolist() if found else [], strict=True))  # waits once
    best = max(accuracies, key=accuracies.__getitem__, default=None)
    if best is not None and accuracies[best] <= 1 / classes:
        best = None
    return Transfer(best, accuracies)


def _features(network: MaskedNetwork, x: Tensor, task: str) -> Tensor:
    """The features of all inputs, in chunks of one size: the last one begins with inputs of the one before."""
    size = CHUNK.get(x.device.type, CHUNK["cpu"])
    pieces = []
    for done in range(0, len(x), size):
        start = max(min(done, len(x) - size), 0)
        pieces.append(network.features(x[start : done + size], task)[done - start :])
    return torch.cat(pieces)


def knn_accuracy(features: Tensor, labels: Tensor, classes: int, neighbours: int = 10) -> float:
    """Accuracy of a nearest-neighbour vote: the first 66 % are fitted, the rest scored; ties to the nearest."""
    return float(_accuracy(features, labels, classes, neighbours))


def _accuracy(features: Tensor, labels: Tensor, classes: int, neighbours: int) -> Tensor:
    fitted = len(features) * FIT_PERCENT // 100
    known, scored = features[:fitted].float(), features[fitted:].float()
    if len(known) == 0 or len(scored) == 0:
        return torch.zeros((), dtype=torch.float64, device=features.device)
    distances = torch.cdist(scored, known, compute_mode="donot_use_mm_for_euclid_dist")
    order = distances.sort(dim=1, stable=True).indices  # of equal distances the first; NaN is the largest
    nearest = labels[:fitted][order[:, :neighbours]]  # [scored, k]
    k = nearest.shape[1]
    votes = nearest.new_zeros(len(scored), classes).scatter_add_(1, nearest, torch.ones_like(nearest))
    ranks = torch.arange(k, device=nearest.device).expand_as(nearest)
    first = nearest.new_full(votes.shape, k).scatter_reduce_(1, nearest, ranks, "amin")  # of each class's members
    # more votes win; among equals the class seen at the lower rank
    choice = (votes * (k + 1) - first).argmax(1)
    return (choice == labels[fitted:]).double().mean()


def scores_from_mask(fresh: Tensor, mask: Tensor, layout: Layout) -> Tensor:
    """Fresh scores (float32), rearranged so that the largest |s| of each layer lie on the lender's bits.

    The set of magnitudes, the signs, and the order within the bits and outside them stay as drawn.
    """
    found = torch.empty_like(fresh)
    pieces = zip(layout.slices(fresh), layout.slices(mask.to(fresh.device)), layout.slices(found), strict=True)
    for scores, bits, out in pieces:
        magnitudes, ranked = scores.abs().sort(descending=True, stable=True)
        on_bits = bits[ranked]
        out[torch.cat([ranked[on_bits], ranked[~on_bits]])] = magnitudes
    return found.copysign_(fresh)
