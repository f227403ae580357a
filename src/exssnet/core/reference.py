"""The paper in the plainest PyTorch there is: the oracle that every fast path is tested against.

One tensor per layer, lists of layers, lists of tasks; no code shared with the rest of the package. Read it
next to the paper: initialisation, phase 1, phase 2, overlap, KKT, metrics.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy

Layers = Sequence[Tensor]  # one tensor per layer, any shape
Forward = Callable[[list[Tensor], Tensor], Tensor]  # (effective weights, x) -> logits
Epochs = Sequence[Sequence[tuple[Tensor, Tensor]]]  # the batches (x, y) of each epoch
Matrix = Sequence[Sequence[float | None]]  # a[i][j]: accuracy on task j after learning task i


# --- Initialisation -----------------------------------------------------------------------------------------


def signed_constant(shape: Sequence[int], fan_in: int, generator: Generator) -> Tensor:
    """Weights of one magnitude and random sign: ±√2/√fan_in."""
    signs = 2.0 * torch.randint(0, 2, tuple(shape), generator=generator) - 1.0
    return signs * math.sqrt(2 / fan_in)


def fresh_scores(shape: Sequence[int], fan_in: int, generator: Generator) -> Tensor:
    """Scores uniform in ±1/√fan_in."""
    return (2.0 * torch.rand(tuple(shape), generator=generator) - 1.0) / math.sqrt(fan_in)


# --- Phase 1: the mask --------------------------------------------------------------------------------------


def keep(n: int, density: float) -> int:
    """How many of n weights a mask selects: n − ⌊(1−k)·n⌋, the density k being the decimal as written."""
    return n - math.floor((1 - Fraction(str(density))) * n)


def mask(scores: Tensor, density: float) -> Tensor:
    """One layer's bits: the largest |s|, exactly `keep` of them; equal scores go to the lower flat index."""
    order = scores.detach().abs().flatten().argsort(descending=True, stable=True)
    bits = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    bits[order[: keep(scores.numel(), density)]] = True
    return bits.reshape(scores.shape)


def score_gradient(scores: Tensor, weights: Tensor, grad_effective: Tensor) -> Tensor:
    """Straight through the selection: ds = sign(s) · w · dL/d(w⊙m), also for the weights now masked out."""
    return scores.sign() * weights * grad_effective


def cosine(lr: float, epoch: int, epochs: int) -> float:
    """The learning rate of an epoch counted from 0: lr · (1 + cos(π·epoch/epochs)) / 2."""
    return lr * (1 + math.cos(math.pi * epoch / epochs)) / 2


def learn_mask(
    forward: Forward, weights: Layers, scores: Layers, batches: Epochs, density: float, lr: float
) -> list[Tensor]:
    """Phase 1: the scores after training them, the weights fixed. The task's mask is `mask` of each."""
    weights = [w.detach() for w in weights]
    scores = [s.detach().clone() for s in scores]
    adam = torch.optim.Adam(scores, lr)
    for epoch, epoch_batches in enumerate(batches):
        adam.param_groups[0]["lr"] = cosine(lr, epoch, len(batches))
        for x, y in epoch_batches:
            effective = [(w * mask(s, density)).requires_grad_() for w, s in zip(weights, scores, strict=True)]
            loss = cross_entropy(forward(effective, x), y)
            gradients = torch.autograd.grad(loss, effective)
            for s, w, g in zip(scores, weights, gradients, strict=True):
                s.grad = score_gradient(s, w, g)
            adam.step()
    return [s.detach() for s in scores]


# --- Phase 2: exclusive weight training ---------------------------------------------------------------------


def learn_free_weights(
    forward: Forward, weights: Layers, masks: Layers, free: Layers, batches: Epochs, lr: float
) -> list[Tensor]:
    """Phase 2: the weights after training the free ones. ExSSNeT: free = M ∧ ¬used; SSNeT: free = M."""
    old = [w.detach().clone() for w in weights]
    new = [w.clone().requires_grad_() for w in old]
    adam = torch.optim.Adam(new, lr)
    for epoch, epoch_batches in enumerate(batches):
        adam.param_groups[0]["lr"] = cosine(lr, epoch, len(batches))
        for x, y in epoch_batches:
            effective = [m * torch.where(f, p, w) for m, f, p, w in zip(masks, free, new, old, strict=True)]
            loss = cross_entropy(forward(effective, x), y)
            for p, g in zip(new, torch.autograd.grad(loss, new), strict=True):
                p.grad = g
            adam.step()
    return [torch.where(f, p.detach(), w) for f, p, w in zip(free, new, old, strict=True)]


# --- Used, free, overlap ------------------------------------------------------------------------------------


def union(tasks: Sequence[Layers]) -> list[Tensor]:
    """U: per layer, the weights that any of the tasks uses; no tasks, no layers."""
    return [torch.stack(layers).any(0) for layers in zip(*tasks, strict=True)]


def free(masks: Layers, earlier: Sequence[Layers]) -> list[Tensor]:
    """F = M ∧ ¬U: per layer, the weights of this task that no earlier task uses."""
    if not earlier:
        return [m.clone() for m in masks]
    return [m & ~used for m, used in zip(masks, union(earlier), strict=True)]


def sparse_overlap(masks: Layers, earlier: Sequence[Layers]) -> float:
    """|M ∧ U| / |M| over all layers: the share of this task's weights that earlier tasks use."""
    size = sum(int(m.sum()) for m in masks)
    return (size - sum(int(f.sum()) for f in free(masks, earlier))) / size


def sparse_overlaps(tasks: Sequence[Layers]) -> list[float | None]:
    """The sparse overlap of every task in the order learned; the first has nothing to overlap with."""
    return [sparse_overlap(masks, tasks[:i]) if i else None for i, masks in enumerate(tasks)]


# --- KKT: which earlier task lends its mask -----------------------------------------------------------------


def knn_accuracy(features: Tensor, labels: Tensor, fit: float = 0.66, k: int = 10) -> float:
    """Accuracy of a k-nearest-neighbour vote: the first ⌊fit·n⌋ examples vote on the rest (n ≥ 2).

    Euclidean, equally near examples by index; of the classes with most votes, the one with the nearest.
    """
    cut = math.floor(Fraction(str(fit)) * len(labels))
    correct = 0
    for x, y in zip(features[cut:], labels[cut:], strict=True):
        distances = (features[:cut] - x).square().sum(1)
        nearest_first = labels[:cut][distances.argsort(stable=True)[:k]].tolist()
        vote = Counter(nearest_first).most_common(1)[0][0]  # equal counts: the first one met, so the nearest
        correct += vote == int(y)
    return correct / (len(labels) - cut)


def lender(accuracies: Sequence[float], classes: int) -> int | None:
    """The earlier task with the best accuracy, the first of equals, if it beats chance; otherwise none."""
    best = max(range(len(accuracies)), key=lambda task: accuracies[task], default=None)
    return best if best is not None and accuracies[best] > 1 / classes else None


def scores_from_mask(fresh: Tensor, lender_mask: Tensor) -> Tensor:
    """Fresh scores whose largest |s| are moved to the lender's bits.

    Each position keeps its sign; those inside the bits keep their order by |s|, and so do those outside.
    """
    bits = lender_mask.flatten()
    order = fresh.abs().flatten().argsort(descending=True, stable=True)
    bits_first = torch.cat([order[bits[order]], order[~bits[order]]])
    magnitudes = torch.empty_like(fresh).flatten()
    magnitudes[bits_first] = fresh.abs().flatten()[order]
    return torch.copysign(magnitudes.reshape(fresh.shape), fresh)


# --- Metrics ------------------------------------------------------------------------------------------------


def average_accuracy(matrix: Matrix) -> float:
    """Mean of the last row."""
    last = [a for a in matrix[-1] if a is not None]
    return sum(last) / len(last)


def forgetting(matrix: Matrix) -> float:
    """Mean over t < N of max_{k ≤ N−1} a[k,t] − a[N,t]; negative where later tasks helped."""
    return _mean_drop(matrix, lambda t: _best(matrix[:-1], t))


def forgetting_avalanche(matrix: Matrix) -> float:
    """As Avalanche has it: mean over t < N of a[t,t] − a[N,t]."""
    return _mean_drop(matrix, lambda t: _entry(matrix[t], t))


def forgetting_mammoth(matrix: Matrix) -> float:
    """As Mammoth has it: the maximum includes the last row, so it is never negative."""
    return _mean_drop(matrix, lambda t: _best(matrix, t))


def _mean_drop(matrix: Matrix, before: Callable[[int], float]) -> float:
    drops = [before(t) - _entry(matrix[-1], t) for t in range(len(matrix) - 1)]
    return sum(drops) / len(drops) if drops else 0.0  # one task: nothing to forget


def _best(rows: Matrix, task: int) -> float:
    return max(a for row in rows if (a := row[task]) is not None)


def _entry(row: Sequence[float | None], task: int) -> float:
    accuracy = row[task]
    if accuracy is None:
        raise ValueError(f"no accuracy for task {task}, which had been learned: {row}")
    return accuracy
