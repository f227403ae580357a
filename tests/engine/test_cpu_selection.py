"""The selection of each engine, step after step, against the reference."""

import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.test_selection import counts, densities, expected, layout_of, shapes
from tests.parts import need

from exssnet.core import reference
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import masked_weights
from exssnet.core.subnetwork import ScoredSubnetwork
from exssnet.engine.cpu.engine import CpuEngine
from exssnet.models import build

need("numba", "the selection on a CPU needs numba: pip install numba")

from exssnet.engine.cpu import selection as of_cpu  # noqa: E402
from exssnet.engine.cpu.selection import CpuSelection  # noqa: E402


def plain(layout, keep):
    """The selection of the plain engine, in the same form."""
    return lambda scores, weights: masked_weights(scores, weights, layout, keep)


selections = pytest.mark.parametrize("selection_type", [plain, CpuSelection])


def assert_step_equals_the_reference(selection, scores, weights, layout, density, draw):
    variable = scores.clone().requires_grad_()
    masked = selection(variable, weights)
    inflow = torch.randn(layout.size, generator=draw, dtype=weights.dtype)
    masked.backward(inflow)
    assert torch.equal(masked, expected(scores, weights, layout, density))
    assert torch.equal(variable.grad, reference.score_gradient(scores, weights, inflow))


@selections
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    shapes=shapes, density=densities, seed=st.integers(0, 2**31), levels=st.sampled_from([0, 2, 1000]),
    moves=st.lists(st.sampled_from([0.0, 0.001, 0.05, 3.0]), min_size=1, max_size=6),
)  # fmt: skip
@example(shapes=[(3,), (1,), (1,), (8,)], density=0.01, seed=0, levels=0, moves=[0.0, 0.0, 0.0, 3.0, 3.0])
def test_masks_of_scores_that_move_equal_the_reference_in_every_step(
    selection_type, dtype, shapes, density, seed, levels, moves
):
    layout = layout_of(shapes)
    draw = torch.Generator().manual_seed(seed)
    selection = selection_type(layout, counts(layout, density))
    scores = torch.randn(layout.size, generator=draw, dtype=dtype)
    weights = torch.randn(layout.size, generator=draw, dtype=dtype)
    for move in moves:
        scores = scores + move * torch.randn(layout.size, generator=draw, dtype=dtype)
        if levels:
            scores = (scores * levels).round() / levels  # ties, 0.0 and -0.0 among them
        assert_step_equals_the_reference(selection, scores, weights, layout, density, draw)


@selections
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("density", [0.0005, 0.1, 0.5, 1.0])
def test_masks_of_large_layers_equal_the_reference_in_every_step_of_training(selection_type, dtype, density):
    layout = layout_of([(300, 101), (2_000,), (64, 32)])
    draw = torch.Generator().manual_seed(0)
    selection = selection_type(layout, counts(layout, density))
    scores, weights = (torch.randn(layout.size, generator=draw, dtype=dtype) for _ in range(2))
    for number in range(40):
        size = 0.5 if number % 10 == 9 else 0.001  # now and then the threshold leaves the band
        scores = scores + size * torch.randn(layout.size, generator=draw, dtype=dtype)
        assert_step_equals_the_reference(selection, scores, weights, layout, density, draw)


@selections
def test_masks_of_scores_of_few_levels_equal_the_reference_in_every_step(selection_type):
    layout = layout_of([(5_000,), (333,)])
    draw = torch.Generator().manual_seed(0)
    selection = selection_type(layout, counts(layout, 0.3))
    weights = torch.randn(layout.size, generator=draw)
    for levels in (3, 3, 4, 1, 2, 50, 50, 3):
        scores = torch.randint(-levels, levels + 1, (layout.size,), generator=draw) / 50
        assert_step_equals_the_reference(selection, scores, weights, layout, 0.3, draw)


@selections
def test_scores_that_become_zero_have_no_gradient_until_they_move_again(selection_type):
    layout = layout_of([(200,)])
    selection = selection_type(layout, (20,))
    weights = torch.ones(200)
    for values in (torch.linspace(-1, 1, 200), torch.zeros(200), -torch.zeros(200), torch.linspace(1, -1, 200)):
        scores = values.clone().requires_grad_()
        selection(scores, weights).sum().backward()
        assert torch.equal(scores.grad, values.sign())


@selections
def test_weights_outside_the_mask_of_a_step_are_plain_zeros(selection_type):
    layout = layout_of([(130,)])
    selection = selection_type(layout, (13,))
    for seed in range(3):
        scores = torch.randn(130, generator=torch.Generator().manual_seed(seed))
        masked = selection(scores, torch.full((130,), -1.0))
        assert int(torch.signbit(masked).sum()) == 13


@selections
def test_scores_that_are_no_numbers_do_not_stop_a_step(selection_type):
    layout = layout_of([(1_000,), (70,)])
    selection = selection_type(layout, (100, 7))
    weights = torch.ones(layout.size)
    scores = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    selection(scores, weights)
    for lost in (1, 50, 500, 1_070):
        broken = scores.clone()
        broken[:lost] = torch.nan
        broken.requires_grad_()
        selection(broken, weights).backward(weights)
        assert torch.equal(broken.grad, reference.score_gradient(broken.detach(), weights, weights))
    draw = torch.Generator().manual_seed(1)  # and when they are numbers again, all is well
    assert_step_equals_the_reference(selection, scores, weights, layout, 0.1, draw)


SMALL = layout_of([(500,)])


def of_500(selection_type):
    return selection_type(SMALL, (50,)), torch.Generator().manual_seed(0)


@selections
def test_two_backward_passes_add_up(selection_type):
    selection, draw = of_500(selection_type)
    weights, first, second = (torch.randn(500, generator=draw) for _ in range(3))
    scores = torch.randn(500, generator=draw).requires_grad_()
    selection(scores, weights).backward(first)
    selection(scores, weights).backward(second)
    once = [reference.score_gradient(scores.detach(), weights, inflow) for inflow in (first, second)]
    assert torch.equal(scores.grad, once[0] + once[1])


@selections
def test_a_gradient_that_is_kept_stays_as_it_is(selection_type):
    selection, draw = of_500(selection_type)
    weights, scores = (torch.randn(500, generator=draw) for _ in range(2))
    kept = []
    for _ in range(3):
        scores = (scores + 0.1 * torch.randn(500, generator=draw)).detach().requires_grad_()
        inflow = torch.randn(500, generator=draw)
        selection(scores, weights).backward(inflow)
        kept.append((scores.grad, reference.score_gradient(scores.detach(), weights, inflow)))
    assert all(torch.equal(found, wanted) for found, wanted in kept)


@selections
def test_a_result_that_is_kept_and_its_gradient_are_those_of_its_own_scores(selection_type):
    selection, draw = of_500(selection_type)
    weights = torch.randn(500, generator=draw)
    kept = []
    for _ in range(3):
        scores = torch.randn(500, generator=draw).requires_grad_()
        view = selection(scores, weights)[100:]  # only a view of it is kept
        kept.append((scores, view, expected(scores, weights, SMALL, 0.1)[100:]))
    assert all(torch.equal(view, wanted) for _, view, wanted in kept)
    for scores, view, _ in kept:
        inflow = torch.randn(400, generator=draw)
        view.backward(inflow)
        all_of_it = torch.cat([torch.zeros(100), inflow])
        assert torch.equal(scores.grad, reference.score_gradient(scores.detach(), weights, all_of_it))


@selections
def test_weights_that_change_between_steps_are_those_that_are_masked(selection_type):
    selection, draw = of_500(selection_type)
    scores, weights = (torch.randn(500, generator=draw) for _ in range(2))
    assert_step_equals_the_reference(selection, scores, weights, SMALL, 0.1, draw)
    weights.mul_(2)
    assert_step_equals_the_reference(selection, scores, weights, SMALL, 0.1, draw)
    assert_step_equals_the_reference(selection, scores, weights + 1, SMALL, 0.1, draw)


@pytest.mark.parametrize(("name", "side", "steps"), [("lenet-300-100", 28, 10), ("resnet18", 8, 4)])
def test_training_with_the_compiled_selection_and_without_is_the_same(name, side, steps, monkeypatch):
    def scores_after_training():
        network = MaskedNetwork(build(name, (1, side, side), 2), seed=1)
        network.use(CpuEngine())
        scored = ScoredSubnetwork(network, "task", 2)
        optimizer = torch.optim.Adam(scored.parameters(), 0.01)
        x = torch.rand(32, 1, side, side, generator=torch.Generator().manual_seed(0))
        for _ in range(steps):
            loss = scored.logits(x, training=True).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return scored.scores.detach()

    made = []
    real = of_cpu.CpuSelection.masked
    monkeypatch.setattr(of_cpu.CpuSelection, "masked", lambda *given: made.append(1) or real(*given))
    found = scores_after_training()
    assert len(made) == steps
    monkeypatch.setitem(sys.modules, "exssnet.engine.cpu.selection", None)  # an import of it fails now
    assert torch.equal(found, scores_after_training())
    assert len(made) == steps
