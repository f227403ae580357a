"""KKT: a k-nearest-neighbour test picks the earlier task whose mask starts the new one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from exssnet.core.layout import Layout
from exssnet.core.network import MaskedNetwork
from exssnet.engine.execution import EVALUATED

FIT_PERCENT = 66
CHUNK = {"cpu": 64, "cuda": 640}  # inputs run through a subnetwork at once
AT_ONCE = 1 << 22  # numbers that are made together for several earlier tasks: memory stays small
MAGNITUDE, PLACE = 0x7FFFFFFF, 0xFFFFFFFF  # bits of a float without its sign, and of a place in a key


@dataclass(frozen=True)
class Transfer:
    """The outcome of the test: who lends (None if nobody beats chance), and every candidate's accuracy."""

    lender: str | None
    accuracies: dict[str, float]


def find_lender(network: MaskedNetwork, x: Tensor, y: Tensor, classes: int, neighbours: int = 10) -> Transfer:
    """Score each earlier task's features on one sample of the new task; the best lends if it beats chance."""
    names = list(network.tasks)
    fitted = _fitted(len(x))
    several = max(1, AT_ONCE // max(network.layout.size, fitted * (len(x) - fitted)))
    found: list[Tensor] = []
    for some in (names[start : start + several] for start in range(0, len(names), several)):
        with network.ready.several(some):
            for features in _stacks(_features(network, x, task) for task in some):
                found.append(_vote_accuracies(_distances(features), y, classes, neighbours))
    accuracies = dict(zip(network.tasks, torch.cat(found).tolist() if found else [], strict=True))
    best = max(accuracies, key=accuracies.__getitem__, default=None)
    if best is not None and accuracies[best] <= 1 / classes:
        best = None
    return Transfer(best, accuracies)


def _features(network: MaskedNetwork, x: Tensor, task: str) -> Tensor:
    """The features of all inputs, chunk by chunk.

    Where kernels are compiled for a number of inputs, all chunks have the size for which an evaluation has had them
    made: the last one begins with inputs of the one before.
    """
    size = EVALUATED if network.runner.narrow else CHUNK.get(x.device.type, CHUNK["cpu"])
    pieces = []
    for done in range(0, len(x), size):
        start = max(min(done, len(x) - size), 0)
        pieces.append(network.features(x[start : done + size], task)[done - start :])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _stacks(features: Iterable[Tensor]) -> Iterator[Tensor]:
    """Features of several tasks together, as long as that is not too much."""
    waiting: list[Tensor] = []
    for one in features:
        waiting.append(one)
        if (len(waiting) + 1) * one.numel() > AT_ONCE:
            yield torch.stack(waiting)
            waiting = []
    if waiting:
        yield torch.stack(waiting)


def knn_accuracy(features: Tensor, labels: Tensor, classes: int, neighbours: int = 10) -> float:
    """Accuracy of a nearest-neighbour vote: the first 66 % are fitted, the rest scored; ties to the nearest."""
    return float(_vote_accuracies(_distances(features[None]), labels, classes, neighbours))


def _fitted(inputs: int) -> int:
    """How many of the inputs are fitted."""
    return inputs * FIT_PERCENT // 100


def _distances(features: Tensor) -> Tensor:
    """From each input that is asked for to each that is fitted, [tasks, asked, fitted]."""
    known, asked = features.float().tensor_split([_fitted(features.shape[1])], dim=1)
    return torch.cdist(asked, known, compute_mode="donot_use_mm_for_euclid_dist")


def _vote_accuracies(distances: Tensor, labels: Tensor, classes: int, neighbours: int) -> Tensor:
    """The accuracies of several tasks' votes, from distances [tasks, asked, fitted]."""
    tasks, asked, fitted = distances.shape
    if asked == 0 or fitted == 0:
        return torch.zeros(tasks, dtype=torch.float64, device=distances.device)
    nearest = labels[:fitted][_smallest(distances, min(neighbours, fitted))]  # [tasks, asked, k]
    k = nearest.shape[2]
    votes = nearest.new_zeros(tasks, asked, classes).scatter_add_(2, nearest, torch.ones_like(nearest))
    ranks = torch.arange(k, device=nearest.device).expand_as(nearest)
    first = nearest.new_full(votes.shape, k).scatter_reduce_(2, nearest, ranks, "amin")  # of each class's members
    # more votes win; among equals the class seen at the lower rank
    choice = (votes * (k + 1) - first).argmax(2)
    return (choice == labels[fitted:]).double().mean(1)


def _smallest(distances: Tensor, count: int) -> Tensor:
    """Where each row's smallest distances are, in order; equals by index, which a plain `topk` does not promise."""
    return _keys(distances).topk(count, dim=-1, largest=False, sorted=True).values & PLACE


def _keys(values: Tensor) -> Tensor:
    """Integers in the order of the values' magnitudes, those of equals in the order of their places along a row."""
    # the bits of floats from zero up are in the order of the floats; without its sign, a NaN is the largest
    places = torch.arange(values.shape[-1], device=values.device)
    keys = (values.view(torch.int32) & MAGNITUDE).long()
    keys <<= 32
    keys |= places
    return keys


def scores_from_mask(fresh: Tensor, mask: Tensor, layout: Layout) -> Tensor:
    """Fresh scores (float32), rearranged so that the largest |s| of each layer lie on the lender's bits.

    The set of magnitudes, the signs, and the order within the bits and outside them stay as drawn.
    """
    # all layers in one sort, as integers: 32 bits for |s|, the largest first, and above them an even number for each
    # layer, one more for what is not on the bits
    keys = ((fresh.view(torch.int32) & MAGNITUDE) ^ MAGNITUDE).long()
    for number, piece in enumerate(layout.slices(keys)):
        piece += 2 * number << 32
    magnitudes = ((keys.sort().values & MAGNITUDE) ^ MAGNITUDE).int().view(torch.float32)
    bits_first = torch.where(mask.to(fresh.device), keys, keys + (1 << 32)).sort(stable=True).indices
    return torch.empty_like(fresh).index_put_((bits_first,), magnitudes).copysign_(fresh)
