import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.networks import examples, mlp

from exssnet import Model
from exssnet.core import reference
from exssnet.core.layout import Layer, Layout
from exssnet.core.selection import select
from exssnet.core.transfer import find_lender, knn_accuracy, scores_from_mask


@given(st.integers(3, 80), st.integers(2, 5), st.integers(1, 12), st.integers(0, 2**31), st.booleans())
def test_nearest_neighbour_accuracy_equals_the_reference(rows, classes, neighbours, seed, coarse):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 3, generator=draw)
    if coarse:  # equal distances and tied votes
        features = features.round()
    labels = torch.randint(0, classes, (rows,), generator=draw)
    found = knn_accuracy(features, labels, classes, neighbours)
    assert found == pytest.approx(reference.knn_accuracy(features, labels, k=neighbours))


@given(st.integers(2, 200), st.integers(1, 99), st.integers(0, 2**31))
def test_scores_from_a_mask_equal_the_reference_and_select_that_mask(size, percent, seed):
    draw = torch.Generator().manual_seed(seed)
    fresh = torch.randperm(size, generator=draw).double() + 1  # no ties
    fresh *= torch.randint(0, 2, (size,), generator=draw) * 2 - 1
    mask = torch.rand(size, generator=draw) < percent / 100
    layout = Layout((Layer("a", (size,), 1, 0),))
    found = scores_from_mask(fresh, mask, layout)
    assert torch.equal(found, reference.scores_from_mask(fresh, mask))
    assert torch.equal(found.abs().sort().values, fresh.abs().sort().values)
    if mask.any():
        assert torch.equal(select(found, layout, (int(mask.sum()),)), mask)


def planted(related: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Task `related` told apart by one block of inputs that is noise in all other tasks."""
    draw = torch.Generator().manual_seed(related)
    x = 3 * torch.randn(600, 12, generator=draw)
    y = torch.arange(600) % 2
    block = slice(4 * related, 4 * related + 4)
    x[:, block] = 2.0 * (2 * y[:, None] - 1) * torch.tensor([1.0, -1.0, 1.0, -1.0]) + torch.randn(
        600, 4, generator=draw
    )
    return x, y


def test_the_planted_related_task_lends():
    model = Model(mlp(), density=0.2, seed=0, method="exssnet")
    for number in range(3):
        model.learn(f"block {number}", planted(number), epochs=(8, 8))
    for related in range(3):
        x, y = planted(related)
        lender = find_lender(model._method.network, x[:400], y[:400], classes=2)
        assert lender.lender == f"block {related}", lender.accuracies
        assert set(lender.accuracies) == {"block 0", "block 1", "block 2"}


def test_nobody_lends_when_none_beats_chance():
    model = Model(mlp(), density=0.2, seed=0)
    model.learn("first", examples(0), epochs=(3, 3))
    x = examples(0, rows=200)[0]
    # labels by position: neighbours all carry 0, scored rows are all 1, so accuracy is 0
    y = (torch.arange(200) >= 132).long()
    lender = find_lender(model._method.network, x, y, classes=2)
    assert lender.accuracies["first"] <= 0.5
    assert lender.lender is None


def test_the_first_task_has_nobody_to_borrow_from():
    model = Model(mlp(), density=0.2)
    assert find_lender(model._method.network, *examples(0), classes=2).lender is None


@pytest.mark.parametrize("start", ["bits", "scores"])
def test_a_lent_start_begins_at_the_lenders_mask(start):
    from dataclasses import replace

    from tests.core.networks import task

    from exssnet.methods import parse
    from exssnet.methods.supsup import MaskSettings
    from exssnet.train import Trainer

    method = parse("exssnet+kkt")[0](mlp(), MaskSettings(density=0.2, kkt=True, kkt_start=start, mask_epochs=3), seed=0)
    trainer = Trainer(method, seed=0)
    trainer.learn(task(0))
    again = replace(task(0), name="again")
    scores = method.first_scores(again)
    assert method.transfers["again"].lender == "task-0"
    assert torch.equal(select(scores, method.network.layout, method.network.keep), method.network.mask("task-0"))
