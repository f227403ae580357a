"""The oracle itself, against examples worked by hand and the laws the paper states."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from exssnet.core import reference as ref

law = settings(deadline=None)  # the first call of a torch operator is slow
seeds = st.integers(0, 2**31)
densities = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)
accuracies = st.floats(0, 1, allow_nan=False)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


# --- Initialisation ---


@law
@given(seeds, st.integers(1, 50))
def test_weights_are_one_magnitude_and_scores_stay_within_their_bound(seed: int, fan_in: int) -> None:
    weights = ref.signed_constant((4, fan_in), fan_in, generator(seed))
    scores = ref.fresh_scores((4, fan_in), fan_in, generator(seed))
    torch.testing.assert_close(weights.abs(), torch.full_like(weights, math.sqrt(2) / math.sqrt(fan_in)))
    assert weights.shape == scores.shape == (4, fan_in)
    assert scores.abs().max() <= 1 / math.sqrt(fan_in)


def test_half_of_the_signs_are_negative() -> None:
    weights = ref.signed_constant((100, 100), 100, generator(0))
    assert abs((weights < 0).float().mean() - 0.5) < 0.02


# --- The mask ---


@pytest.mark.parametrize(
    ("n", "density", "kept"),
    [
        (10, 0.9, 9),
        (10, 0.1, 1),
        (11, 0.1, 2),
        (9, 0.5, 5),
        (1, 0.001, 1),
        (7, 1.0, 7),
        (7, 0.0, 0),
        (100, 0.07, 7),
    ],
)
def test_keep_by_hand(n: int, density: float, kept: int) -> None:
    assert ref.keep(n, density) == kept


@law
@given(st.integers(0, 100_000), st.integers(0, 1000))
def test_keep_is_the_ceiling_of_the_share_written_as_a_decimal(n: int, thousandths: int) -> None:
    assert ref.keep(n, thousandths / 1000) == math.ceil(Fraction(thousandths, 1000) * n)


def test_mask_takes_the_largest_magnitudes_of_either_sign() -> None:
    scores = torch.tensor([[0.1, -0.9, 0.3], [0.5, -0.2, 0.0]])
    assert ref.mask(scores, 0.5).tolist() == [[False, True, True], [True, False, False]]


def test_equal_scores_go_to_the_lower_index() -> None:
    assert ref.mask(torch.tensor([0.5, -1.0, 1.0, -0.5, 0.5]), 0.6).tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert ref.mask(torch.zeros(4), 0.5).tolist() == [True, True, False, False]


@law
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), densities)
def test_mask_has_exactly_keep_ones_and_every_one_outranks_every_zero(values: list[int], density: float) -> None:
    chosen = ref.mask(torch.tensor(values, dtype=torch.float32), density)
    assert chosen.dtype == torch.bool
    assert int(chosen.sum()) == ref.keep(len(values), density)
    rank = [(-abs(value), index) for index, value in enumerate(values)]
    ins = [r for r, bit in zip(rank, chosen.tolist(), strict=True) if bit]
    outs = [r for r, bit in zip(rank, chosen.tolist(), strict=True) if not bit]
    assert not ins or not outs or max(ins) < min(outs)


def test_score_gradient_by_hand() -> None:
    scores, weights = torch.tensor([2.0, -3.0, 0.0]), torch.tensor([0.5, 0.5, -1.0])
    assert ref.score_gradient(scores, weights, torch.tensor([4.0, 4.0, 4.0])).tolist() == [2.0, -2.0, 0.0]


@law
@given(seeds)
def test_score_gradient_is_that_of_the_magnitude_taken_straight_through(seed: int) -> None:
    g = generator(seed)
    weights, target = torch.randn(5, generator=g), torch.randn(5, generator=g)
    scores = torch.randn(5, generator=g).requires_grad_()
    hard = ref.mask(scores, 0.4).float()
    effective = weights * (scores.abs() + (hard - scores.abs()).detach())
    (effective - target).square().sum().backward()
    by_hand = ref.score_gradient(scores.detach(), weights, 2 * (effective.detach() - target))
    torch.testing.assert_close(scores.grad, by_hand)


# --- The two phases ---


def linear(effective: list[Tensor], x: Tensor) -> Tensor:
    return x @ effective[0].T


def mlp(effective: list[Tensor], x: Tensor) -> Tensor:
    return (x @ effective[0].T).relu() @ effective[1].T


def problem(seed: int, epochs: int = 3) -> tuple[list[Tensor], list[Tensor], ref.Epochs]:
    """Weights, scores and batches of a tiny MLP: which of two numbers is larger."""
    g = generator(seed)
    shapes = [(8, 2), (2, 8)]
    weights = [ref.signed_constant(s, s[1], g) for s in shapes]
    scores = [ref.fresh_scores(s, s[1], g) for s in shapes]
    x = torch.randn(32, 2, generator=g)
    y = (x[:, 0] > x[:, 1]).long()
    return weights, scores, [[(x[:16], y[:16]), (x[16:], y[16:])] for _ in range(epochs)]


def test_cosine_starts_at_the_rate_and_halves_midway() -> None:
    assert [round(ref.cosine(0.1, e, 4), 4) for e in range(4)] == [0.1, 0.0854, 0.05, 0.0146]


def test_first_step_of_phase_1_moves_each_score_by_the_rate_against_its_gradient() -> None:
    # x = 1 and two classes from two weights: p = softmax(1, 0), so dL/dw = p - onehot(1) = (0.73, -0.73).
    weights, scores = torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.9], [-0.1]])
    batches = [[(torch.ones(1, 1), torch.tensor([1]))]]
    (learned,) = ref.learn_mask(linear, [weights], [scores], batches, density=0.5, lr=0.01)
    # ds = sign(s)·w·g = (+0.73, -0.73): Adam's first step is the rate, also for the weight masked out.
    torch.testing.assert_close(learned, torch.tensor([[0.89], [-0.09]]))


def test_first_step_of_phase_2_moves_only_the_free_weights_of_the_mask() -> None:
    weights = torch.tensor([[1.0, 2.0], [-1.0, 3.0]])
    masks, free = bits(1, 1, 1, 0).reshape(2, 2), bits(1, 0, 1, 0).reshape(2, 2)
    batches = [[(torch.ones(1, 2), torch.tensor([1]))]]
    (learned,) = ref.learn_free_weights(linear, [weights], [masks], [free], batches, lr=0.01)
    torch.testing.assert_close(learned, torch.tensor([[0.99, 2.0], [-0.99, 3.0]]))


def test_the_rate_falls_from_epoch_to_epoch() -> None:
    # A constant gradient makes every step of Adam as long as its rate: lr·(1 + 1/2) in two epochs.
    def constant(effective: list[Tensor], x: Tensor) -> Tensor:
        return 1e-3 * x @ effective[0].T

    batches = [[(torch.ones(1, 1), torch.tensor([1]))]] * 2
    old, on = torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool)
    (learned,) = ref.learn_free_weights(constant, [old], [on], [on], batches, lr=0.01)
    torch.testing.assert_close(learned, torch.tensor([[-0.015], [0.015]]), rtol=1e-3, atol=0)
    (scores,) = ref.learn_mask(constant, [torch.ones(2, 1)], [torch.ones(2, 1)], batches, density=1.0, lr=0.01)
    torch.testing.assert_close(scores - 1, torch.tensor([[-0.015], [0.015]]), rtol=1e-3, atol=0)


@settings(law, max_examples=10)
@given(seeds)
def test_phase_1_by_hand_is_phase_1_by_autograd(seed: int) -> None:
    weights, scores, batches = problem(seed)
    learned = ref.learn_mask(mlp, weights, scores, batches, density=0.5, lr=0.1)
    parameters = [s.clone().requires_grad_() for s in scores]
    adam = torch.optim.Adam(parameters, 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, len(batches))
    for epoch in batches:
        for x, y in epoch:
            magnitudes = [s.abs() for s in parameters]
            straight = [m + (ref.mask(m, 0.5).float() - m).detach() for m in magnitudes]
            adam.zero_grad()
            cross_entropy(mlp([w * m for w, m in zip(weights, straight, strict=True)], x), y).backward()
            adam.step()
        schedule.step()
    for by_hand, by_autograd in zip(learned, parameters, strict=True):
        torch.testing.assert_close(by_hand, by_autograd.detach(), rtol=1e-3, atol=1e-3)


@settings(law, max_examples=10)
@given(seeds)
def test_phase_2_does_not_see_the_weights_outside_the_mask(seed: int) -> None:
    weights, scores, batches = problem(seed)
    masks = [ref.mask(s, 0.5) for s in scores]
    others = [torch.where(m, w, 7.0) for m, w in zip(masks, weights, strict=True)]
    one, two = (ref.learn_free_weights(mlp, w, masks, masks, batches, lr=0.1) for w in (weights, others))
    assert all(torch.equal(a[m], b[m]) for a, b, m in zip(one, two, masks, strict=True))


@settings(law, max_examples=10)
@given(seeds)
def test_phases_leave_what_they_were_given_and_may_not_change(seed: int) -> None:
    weights, scores, batches = problem(seed)
    before = [t.clone() for t in weights + scores]
    learned = ref.learn_mask(mlp, weights, scores, batches, density=0.5, lr=0.1)
    masks = [ref.mask(s, 0.5) for s in learned]
    earlier = [ref.mask(s, 0.5) for s in scores]
    free = ref.free(masks, [earlier])
    new = ref.learn_free_weights(mlp, weights, masks, free, batches, lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights + scores, strict=True))
    for w, n, f, e in zip(weights, new, free, earlier, strict=True):
        assert torch.equal(w[~f], n[~f])
        assert torch.equal(w * e, n * e)  # the earlier task's subnetwork, bit for bit


@settings(law, max_examples=5)
@given(seeds)
def test_with_nothing_free_phase_2_returns_the_weights(seed: int) -> None:
    weights, scores, batches = problem(seed)
    masks = [ref.mask(s, 0.5) for s in scores]
    nothing = [torch.zeros_like(m) for m in masks]
    new = ref.learn_free_weights(mlp, weights, masks, nothing, batches, lr=0.1)
    assert all(torch.equal(w, n) for w, n in zip(weights, new, strict=True))


def test_both_phases_lower_the_loss() -> None:
    weights, scores, batches = problem(seed=3, epochs=40)

    def loss(weights: list[Tensor], masks: list[Tensor]) -> float:
        effective = [w * m for w, m in zip(weights, masks, strict=True)]
        return sum(float(cross_entropy(mlp(effective, x), y)) for x, y in batches[0])

    drawn = [ref.mask(s, 0.5) for s in scores]
    masks = [ref.mask(s, 0.5) for s in ref.learn_mask(mlp, weights, scores, batches, 0.5, 0.05)]
    new = ref.learn_free_weights(mlp, weights, masks, masks, batches, 0.05)
    assert loss(new, masks) < loss(weights, masks) < loss(weights, drawn)


# --- Used, free, overlap ---

TASKS = [[bits(1, 1, 0, 0), bits(1, 0)], [bits(0, 1, 1, 0), bits(0, 1)], [bits(1, 0, 1, 0), bits(0, 1)]]


def test_union_free_and_overlap_by_hand() -> None:
    assert [u.tolist() for u in ref.union(TASKS[:2])] == [[True, True, True, False], [True, True]]
    assert [f.tolist() for f in ref.free(TASKS[1], TASKS[:1])] == [[False, False, True, False], [False, True]]
    assert ref.sparse_overlap(TASKS[1], TASKS[:1]) == 1 / 3
    assert ref.sparse_overlaps(TASKS) == [None, 1 / 3, 1.0]


def test_the_first_task_finds_everything_free() -> None:
    assert ref.union([]) == []
    assert all(torch.equal(f, m) for f, m in zip(ref.free(TASKS[0], []), TASKS[0], strict=True))
    assert ref.sparse_overlap(TASKS[0], []) == 0.0


@law
@given(seeds, st.integers(1, 6))
def test_free_weights_partition_the_used_ones(seed: int, tasks: int) -> None:
    g = generator(seed)
    masks = [[torch.rand(n, generator=g) < 0.4 for n in (7, 12)] for _ in range(tasks)]
    owners = sum(torch.cat(ref.free(m, masks[:i])).int() for i, m in enumerate(masks))
    assert torch.equal(owners, torch.cat(ref.union(masks)).int())  # each used weight is free for one task, the first


def test_independent_masks_overlap_as_the_law_says() -> None:
    g, k = generator(0), 0.1
    tasks = [[ref.mask(torch.rand(200_000, generator=g), k)] for _ in range(5)]
    overlaps = ref.sparse_overlaps(tasks)
    expected = [1 - (1 - k) ** i for i in range(5)]
    assert overlaps[1:] == pytest.approx(expected[1:], abs=0.01)
    assert sum(expected[1:]) / 4 == pytest.approx(0.226, abs=5e-4)


# --- KKT ---


def test_neighbours_vote_and_the_rest_is_scored() -> None:
    # ⌊0.66·6⌋ = 3 vote: 0 and 1 for class 0, 10 for class 1. 0.4, 2 and 9 are of class 0, but 9 is near 10.
    features = torch.tensor([[0.0], [1.0], [10.0], [0.4], [2.0], [9.0]])
    labels = torch.tensor([0, 0, 1, 0, 0, 0])
    assert ref.knn_accuracy(features, labels, k=1) == 2 / 3
    assert ref.knn_accuracy(features, labels, k=3) == 1.0  # the two of class 0 outvote the one nearer


def test_a_tied_vote_goes_to_the_nearest_of_the_tied_classes() -> None:
    # Nearest first: 2, 1, 0, 0, 1. Class 2 is nearest but has one vote; 1 and 0 have two, and 1 is nearer.
    features = torch.tensor([[0.1], [0.2], [0.3], [0.4], [0.5], [0.0], [0.0], [0.0]])
    for claimed, accuracy in [(0, 0.0), (1, 1.0), (2, 0.0)]:
        labels = torch.tensor([2, 1, 0, 0, 1, claimed, claimed, claimed])
        assert ref.knn_accuracy(features, labels) == accuracy


@law
@given(seeds)
def test_separated_classes_are_told_apart_and_the_space_may_be_rotated(seed: int) -> None:
    g = generator(seed)
    labels = torch.arange(60) % 3
    features = torch.randn(60, 3, generator=g, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=torch.float64)).Q
    assert ref.knn_accuracy(features + 100 * torch.eye(3)[labels], labels) == 1.0
    assert ref.knn_accuracy(features, labels) == ref.knn_accuracy(features @ rotation, labels)


@pytest.mark.parametrize(
    ("candidates", "classes", "chosen"),
    [([], 2, None), ([0.5], 2, None), ([0.51], 2, 0), ([0.4, 0.9, 0.9], 2, 1), ([0.2, 0.3], 4, 1)],
)
def test_lender_by_hand(candidates: list[float], classes: int, chosen: int | None) -> None:
    assert ref.lender(candidates, classes) == chosen


def test_scores_from_mask_by_hand() -> None:
    fresh = torch.tensor([0.1, -0.4, 0.3, -0.2])
    # |s| from the top: 0.4 0.3 0.2 0.1. The lender's places by fresh |s|: 3, 0; the others: 1, 2.
    assert ref.scores_from_mask(fresh, bits(1, 0, 0, 1)).tolist() == pytest.approx([0.3, -0.2, 0.1, -0.4])


@law
@given(seeds, densities)
def test_scores_from_mask_start_at_the_lenders_mask(seed: int, density: float) -> None:
    g = generator(seed)
    fresh = torch.randn(4, 5, generator=g, dtype=torch.float64)  # no two magnitudes equal
    lent = ref.mask(torch.randn(4, 5, generator=g), density)
    scores = ref.scores_from_mask(fresh, lent)
    assert torch.equal(ref.mask(scores, density), lent)
    assert torch.equal(scores.sign(), fresh.sign())
    assert torch.equal(scores.abs().flatten().sort().values, fresh.abs().flatten().sort().values)
    for group in (lent, ~lent):  # ranks inside a group are those of the fresh scores
        assert torch.equal(scores[group].abs().argsort(), fresh[group].abs().argsort())


@law
@given(seeds, densities)
def test_scores_whose_mask_is_the_lenders_stay_as_they_are(seed: int, density: float) -> None:
    fresh = torch.randn(17, generator=generator(seed))
    assert torch.equal(ref.scores_from_mask(fresh, ref.mask(fresh, density)), fresh)


# --- Metrics ---

MATRIX = [[0.8, None, None], [0.9, 0.6, None], [0.5, 0.7, 1.0]]


def test_metrics_by_hand() -> None:
    assert ref.average_accuracy(MATRIX) == pytest.approx((0.5 + 0.7 + 1.0) / 3)
    assert ref.forgetting(MATRIX) == pytest.approx(((0.9 - 0.5) + (0.6 - 0.7)) / 2)
    assert ref.forgetting_avalanche(MATRIX) == pytest.approx(((0.8 - 0.5) + (0.6 - 0.7)) / 2)
    assert ref.forgetting_mammoth(MATRIX) == pytest.approx(((0.9 - 0.5) + (0.7 - 0.7)) / 2)


def test_one_task_forgets_nothing() -> None:
    assert ref.average_accuracy([[0.75]]) == 0.75
    assert ref.forgetting([[0.75]]) == ref.forgetting_avalanche([[0.75]]) == ref.forgetting_mammoth([[0.75]]) == 0.0


def test_a_missing_accuracy_of_a_learned_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task 0"):
        ref.forgetting([[0.5, None], [None, 0.5]])


@law
@given(
    st.integers(2, 5).flatmap(lambda n: st.lists(st.lists(accuracies, min_size=n, max_size=n), min_size=n, max_size=n))
)
def test_the_three_forgettings_are_ordered_and_vanish_where_nothing_changes(full: list[list[float]]) -> None:
    matrix = [[a if j <= i else None for j, a in enumerate(row)] for i, row in enumerate(full)]
    avalanche, ours, mammoth = (f(matrix) for f in (ref.forgetting_avalanche, ref.forgetting, ref.forgetting_mammoth))
    assert avalanche <= ours + 1e-12
    assert ours <= mammoth + 1e-12
    assert mammoth >= 0
    kept = [[full[0][j] if j <= i else None for j in range(len(full))] for i in range(len(full))]
    assert ref.forgetting(kept) == ref.forgetting_avalanche(kept) == ref.forgetting_mammoth(kept) == 0.0
