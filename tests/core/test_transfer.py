from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.networks import examples, mlp, task

from exssnet import Model
from exssnet.core import reference, transfer
from exssnet.core.init import fresh_head, fresh_scores
from exssnet.core.layout import Layer, Layout
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import select
from exssnet.core.transfer import find_lender, knn_accuracy, scores_from_mask
from exssnet.data import TensorData
from exssnet.data.tensors import Shared
from exssnet.methods import parse
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.train import Trainer


@given(
    st.integers(3, 80), st.integers(2, 5), st.integers(1, 12), st.integers(0, 2**31), st.booleans(),
    st.sampled_from([None, float("inf"), float("nan")]),
)  # fmt: skip
def test_nearest_neighbour_accuracy_equals_the_reference(rows, classes, neighbours, seed, coarse, odd):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 3, generator=draw)
    if coarse:  # equal distances and tied votes
        features = features.round()
    if odd is not None:
        features[torch.rand(features.shape, generator=draw) < 0.1] = odd
    labels = torch.randint(0, classes, (rows,), generator=draw)
    found = knn_accuracy(features, labels, classes, neighbours)
    assert found == pytest.approx(reference.knn_accuracy(features, labels, k=neighbours))


@given(st.lists(st.integers(2, 80), min_size=1, max_size=4), st.integers(1, 99), st.integers(0, 2**31), st.booleans())
def test_scores_from_a_mask_equal_the_reference_and_select_that_mask(sizes, percent, seed, coarse):
    draw = torch.Generator().manual_seed(seed)
    size = sum(sizes)
    fresh = torch.randperm(size, generator=draw).float() + 1  # no ties
    if coarse:
        fresh = (fresh / 7).ceil()
    fresh *= torch.randint(0, 2, (size,), generator=draw) * 2 - 1
    mask = torch.rand(size, generator=draw) < percent / 100
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    layout = Layout(tuple(Layer(str(start), (n,), 1, start) for start, n in zip(starts, sizes, strict=True)))
    found = scores_from_mask(fresh, mask, layout)
    lent = layout.slices(mask)
    for piece, drawn, bits in zip(layout.slices(found), layout.slices(fresh), lent, strict=True):
        assert torch.equal(piece, reference.scores_from_mask(drawn, bits))
        assert torch.equal(piece.abs().sort().values, drawn.abs().sort().values)
    keep = tuple(int(bits.sum()) for bits in lent)
    if min(keep) > 0 and not coarse:
        assert torch.equal(select(found, layout, keep), mask)


def test_a_start_is_the_same_whatever_the_default_number_type():
    layout = Layout((Layer("a", (20, 30), 30, 0),))

    def drawn():
        head = torch.empty(7, 30, dtype=torch.float32)
        return fresh_scores(layout, 3, "task"), fresh_head(head, 5, 30, 3, "task", "weight")

    wanted = drawn()
    torch.set_default_dtype(torch.float64)
    try:
        assert all(torch.equal(now, before) for now, before in zip(drawn(), wanted, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


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


@pytest.mark.parametrize(("right", "lends"), [(33, False), (34, False), (35, True)])
def test_a_lender_must_beat_chance(monkeypatch, right, lends):
    """68 scored examples of two classes: 34 right is chance. Of tasks that are as good the first lends."""
    model = Model(mlp(), density=0.2, seed=0)
    for number, name in enumerate(("first", "second")):
        model.learn(name, examples(number), epochs=(1, 0))
    y = torch.arange(200) % 2
    seen = y.clone()
    seen[132 : 132 + 68 - right] = 1 - y[132 : 132 + 68 - right]  # features that mislead about so many
    monkeypatch.setattr(type(model._method.network), "features", lambda _, x, task: x)
    found = find_lender(model._method.network, seen[:, None].float(), y, classes=2)
    assert found.accuracies == pytest.approx({"first": right / 68, "second": right / 68})
    assert found.lender == ("first" if lends else None)


CHUNK = transfer.CHUNK["cpu"]


@pytest.mark.parametrize("count", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 8])
def test_features_are_made_in_chunks_of_one_size(monkeypatch, count):
    model, sizes = Model(mlp(), density=0.2, seed=0), []
    model.learn("first", examples(0), epochs=(1, 0))
    network, plain = model._method.network, MaskedNetwork.features

    def watched(network, x, task):
        sizes.append(len(x))
        return plain(network, x, task)

    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(0))
    wanted = network.features(x, "first")
    monkeypatch.setattr(MaskedNetwork, "features", watched)
    torch.testing.assert_close(transfer._features(network, x, "first"), wanted)
    assert sizes == [min(count, CHUNK)] * -(-count // CHUNK)


def test_the_first_task_has_nobody_to_borrow_from():
    model = Model(mlp(), density=0.2)
    assert find_lender(model._method.network, *examples(0), classes=2).lender is None


class Watched(TensorData):
    """Data that notes how it is read."""

    def batch(self, index, generator=None):
        self.reads = [*getattr(self, "reads", []), (index, generator)]
        return super().batch(index, generator)


def kkt_method(start):
    settings = MaskSettings(density=0.2, kkt=True, kkt_start=start, mask_epochs=3, kkt_samples=40)
    return parse("exssnet+kkt")[0](mlp(), settings, seed=0)


@pytest.mark.parametrize("start", ["bits", "scores"])
def test_learning_begins_at_the_lenders_mask(start):
    method = kkt_method(start)
    Trainer(method, seed=0).learn(task(0))
    again = replace(task(0), name="again")
    next(method.phases(again))  # ready for the first step
    assert method.transfers["again"].lender == "task-0"
    assert torch.equal(method.subnetwork.mask(), method.network.mask("task-0"))
    fresh = fresh_scores(method.network.layout, 0, "again")
    if start == "bits":
        assert torch.equal(method.subnetwork.scores.detach().abs().sort().values, fresh.abs().sort().values)
    else:
        assert torch.equal(method.subnetwork.scores.detach(), method.scores["task-0"])


def test_the_test_sample_is_drawn_once_from_the_training_data_and_not_augmented():
    method = kkt_method("bits")
    Trainer(method, seed=0).learn(task(0))
    Trainer(method, seed=0).learn(task(1))
    x, y = examples(2)
    watched = Watched(Shared(x), torch.arange(len(y)), y, 2)
    next(method.phases(replace(task(2), train=watched)))
    ((index, generator),) = watched.reads  # one sample for both candidates
    assert generator is None
    assert len(set(index.tolist())) == 40
    assert len(method.transfers["task-2"].accuracies) == 2
    spread = index.double().std() / index.double().mean()  # of all 96 rows: files are often sorted by class
    assert index.max() > 80
    assert index.min() < 16
    assert 0.4 < spread < 0.8  # 0.58 of rows drawn evenly
    watched.reads.clear()
    next(method.phases(replace(task(3), train=watched)))
    assert not torch.equal(watched.reads[0][0], index)  # another task has another sample


def test_without_kkt_nobody_is_asked():
    method = parse("exssnet")[0](mlp(), MaskSettings(density=0.2, mask_epochs=1), seed=0)
    Trainer(method, seed=0).learn(task(0))
    next(method.phases(task(1)))
    assert method.transfers == {}
    assert torch.equal(method.subnetwork.scores.detach(), fresh_scores(method.network.layout, 0, "task-1"))
