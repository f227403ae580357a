import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from exssnet.core import reference
from exssnet.core.layout import Layer, Layout
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import keep_counts, keep_only, masked_weights, select
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork
from exssnet.engine.cpu.selection_cpu import BandSelector
from exssnet.engine.cpu.selection_numba import CompiledSelector
from exssnet.engine.execution import CPU
from exssnet.engine.memory_format import Arrangement
from exssnet.errors import InputError
from exssnet.models import build

shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)
densities = st.one_of(
    st.integers(1, 100).map(lambda percent: percent / 100),
    st.floats(0.001, 1.0, exclude_min=True),
)


def layout_of(shapes):
    layers, start = [], 0
    for number, shape in enumerate(shapes):
        layers.append(Layer(f"layer{number}", shape, 1, start))
        start = layers[-1].stop
    return Layout(tuple(layers))


def counts(layout, density):
    """As `keep_counts`, for layers of any size: the tests also look at layers of a weight or two."""
    return tuple(reference.keep(layer.size, density) for layer in layout.layers)


@given(shapes, densities, st.integers(0, 2**31), st.sampled_from([0, 1, 3, 1000]))
def test_masks_equal_the_reference_exactly_also_with_ties(shapes, density, seed, levels):
    layout = layout_of(shapes)
    draw = torch.Generator().manual_seed(seed)
    if levels:  # few distinct magnitudes: ties everywhere, 0.0 and -0.0 among them
        scores = torch.randint(-levels, levels + 1, (layout.size,), generator=draw) / levels
    else:
        scores = torch.randn(layout.size, generator=draw)
    found = layout.tensors(select(scores, layout, counts(layout, density)))
    for layer in layout.layers:
        wanted = reference.mask(layout.tensors(scores)[layer.name], density)
        assert torch.equal(found[layer.name], wanted)
        assert int(wanted.sum()) == reference.keep(layer.size, density)


selectors = pytest.mark.parametrize("selector_type", [BandSelector, CompiledSelector])


def expected(scores, weights, layout, density):
    """The weights under the reference's mask."""
    mask = torch.cat([reference.mask(piece, density) for piece in layout.slices(scores.detach())])
    return torch.where(mask, weights, 0.0)


def assert_step_equals_the_reference(selector, scores, weights, layout, density, draw):
    variable = scores.clone().requires_grad_()
    masked = selector.masked_weights(variable, weights)
    inflow = torch.randn(layout.size, generator=draw, dtype=weights.dtype)
    masked.backward(inflow)
    assert torch.equal(masked, expected(scores, weights, layout, density))
    assert torch.equal(variable.grad, reference.score_gradient(scores, weights, inflow))


@selectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    shapes=shapes, density=densities, seed=st.integers(0, 2**31), levels=st.sampled_from([0, 2, 1000]),
    moves=st.lists(st.sampled_from([0.0, 0.001, 0.05, 3.0]), min_size=1, max_size=6),
)  # fmt: skip
@example(shapes=[(3,), (1,), (1,), (8,)], density=0.01, seed=0, levels=0, moves=[0.0, 0.0, 0.0, 3.0, 3.0])
def test_masks_of_scores_that_move_equal_the_reference_in_every_step(
    selector_type, dtype, shapes, density, seed, levels, moves
):
    layout = layout_of(shapes)
    draw = torch.Generator().manual_seed(seed)
    selector = selector_type(Arrangement(layout), counts(layout, density))
    scores = torch.randn(layout.size, generator=draw, dtype=dtype)
    weights = torch.randn(layout.size, generator=draw, dtype=dtype)
    for move in moves:
        scores = scores + move * torch.randn(layout.size, generator=draw, dtype=dtype)
        if levels:
            scores = (scores * levels).round() / levels  # ties, 0.0 and -0.0 among them
        assert_step_equals_the_reference(selector, scores, weights, layout, density, draw)


@selectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("density", [0.0005, 0.1, 0.5, 1.0])
def test_masks_of_large_layers_equal_the_reference_in_every_step_of_training(selector_type, dtype, density):
    layout = layout_of([(300, 101), (2_000,), (64, 32)])
    draw = torch.Generator().manual_seed(0)
    selector = selector_type(Arrangement(layout), counts(layout, density))
    scores, weights = (torch.randn(layout.size, generator=draw, dtype=dtype) for _ in range(2))
    for number in range(40):
        size = 0.5 if number % 10 == 9 else 0.001  # now and then the threshold leaves the band
        scores = scores + size * torch.randn(layout.size, generator=draw, dtype=dtype)
        assert_step_equals_the_reference(selector, scores, weights, layout, density, draw)


@selectors
def test_masks_of_scores_of_few_levels_equal_the_reference_in_every_step(selector_type):
    layout = layout_of([(5_000,), (333,)])
    draw = torch.Generator().manual_seed(0)
    selector = selector_type(Arrangement(layout), counts(layout, 0.3))
    weights = torch.randn(layout.size, generator=draw)
    for levels in (3, 3, 4, 1, 2, 50, 50, 3):
        scores = torch.randint(-levels, levels + 1, (layout.size,), generator=draw) / 50
        assert_step_equals_the_reference(selector, scores, weights, layout, 0.3, draw)


@selectors
def test_scores_that_become_zero_have_no_gradient_until_they_move_again(selector_type):
    layout = layout_of([(200,)])
    selector = selector_type(Arrangement(layout), (20,))
    weights = torch.ones(200)
    for values in (torch.linspace(-1, 1, 200), torch.zeros(200), -torch.zeros(200), torch.linspace(1, -1, 200)):
        scores = values.clone().requires_grad_()
        selector.masked_weights(scores, weights).sum().backward()
        assert torch.equal(scores.grad, values.sign())


@selectors
def test_weights_outside_the_mask_of_a_step_are_plain_zeros(selector_type):
    layout = layout_of([(130,)])
    selector = selector_type(Arrangement(layout), (13,))
    for seed in range(3):
        scores = torch.randn(130, generator=torch.Generator().manual_seed(seed))
        masked = selector.masked_weights(scores, torch.full((130,), -1.0))
        assert int(torch.signbit(masked).sum()) == 13


@selectors
def test_scores_that_are_no_numbers_do_not_stop_a_step(selector_type):
    layout = layout_of([(1_000,), (70,)])
    selector = selector_type(Arrangement(layout), (100, 7))
    weights = torch.ones(layout.size)
    scores = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    selector.masked_weights(scores, weights)
    for lost in (1, 50, 500, 1_070):
        broken = scores.clone()
        broken[:lost] = torch.nan
        broken.requires_grad_()
        selector.masked_weights(broken, weights).backward(weights)
        assert torch.equal(broken.grad, reference.score_gradient(broken.detach(), weights, weights))
    draw = torch.Generator().manual_seed(1)  # and when they are numbers again, all is well
    assert_step_equals_the_reference(selector, scores, weights, layout, 0.1, draw)


def test_a_task_whose_scores_are_no_numbers_is_refused_after_steps_with_them():
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 2))
    scored = ScoredSubnetwork(network, "task", 2)
    scored.scores.data[:30_000] = torch.nan
    scored.logits(torch.zeros(2, 1, 28, 28), training=True).sum().backward()
    with pytest.raises(InputError, match="no numbers any more"):
        WeightSubnetwork(scored, None)


SMALL = layout_of([(500,)])


def of_500(selector_type):
    return selector_type(Arrangement(SMALL), (50,)), torch.Generator().manual_seed(0)


@selectors
def test_two_backward_passes_add_up(selector_type):
    selector, draw = of_500(selector_type)
    weights, first, second = (torch.randn(500, generator=draw) for _ in range(3))
    scores = torch.randn(500, generator=draw).requires_grad_()
    selector.masked_weights(scores, weights).backward(first)
    selector.masked_weights(scores, weights).backward(second)
    once = [reference.score_gradient(scores.detach(), weights, inflow) for inflow in (first, second)]
    assert torch.equal(scores.grad, once[0] + once[1])


@selectors
def test_a_gradient_that_is_kept_stays_as_it_is(selector_type):
    selector, draw = of_500(selector_type)
    weights, scores = (torch.randn(500, generator=draw) for _ in range(2))
    kept = []
    for _ in range(3):
        scores = (scores + 0.1 * torch.randn(500, generator=draw)).detach().requires_grad_()
        inflow = torch.randn(500, generator=draw)
        selector.masked_weights(scores, weights).backward(inflow)
        kept.append((scores.grad, reference.score_gradient(scores.detach(), weights, inflow)))
    assert all(torch.equal(found, wanted) for found, wanted in kept)


@selectors
def test_a_result_that_is_kept_and_its_gradient_are_those_of_its_own_scores(selector_type):
    selector, draw = of_500(selector_type)
    weights = torch.randn(500, generator=draw)
    kept = []
    for _ in range(3):
        scores = torch.randn(500, generator=draw).requires_grad_()
        view = selector.masked_weights(scores, weights)[100:]  # only a view of it is kept
        kept.append((scores, view, expected(scores, weights, SMALL, 0.1)[100:]))
    assert all(torch.equal(view, wanted) for _, view, wanted in kept)
    for scores, view, _ in kept:
        inflow = torch.randn(400, generator=draw)
        view.backward(inflow)
        all_of_it = torch.cat([torch.zeros(100), inflow])
        assert torch.equal(scores.grad, reference.score_gradient(scores.detach(), weights, all_of_it))


@selectors
def test_weights_that_change_between_steps_are_those_that_are_masked(selector_type):
    selector, draw = of_500(selector_type)
    scores, weights = (torch.randn(500, generator=draw) for _ in range(2))
    assert_step_equals_the_reference(selector, scores, weights, SMALL, 0.1, draw)
    weights.mul_(2)
    assert_step_equals_the_reference(selector, scores, weights, SMALL, 0.1, draw)
    assert_step_equals_the_reference(selector, scores, weights + 1, SMALL, 0.1, draw)


def test_steps_of_training_use_the_same_memory():
    layout = layout_of([(500,)])
    selector = CompiledSelector(Arrangement(layout), (50,))
    weights, scores = torch.ones(500), torch.randn(500).requires_grad_()
    optimizer = torch.optim.Adam([scores])
    places = set()
    for _ in range(5):
        masked = selector.masked_weights(scores, weights)
        optimizer.zero_grad()
        masked.square().sum().backward()
        places.add((masked.data_ptr(), scores.grad.data_ptr()))
        del masked
        optimizer.step()
    assert len(places) == 1


@selectors
@pytest.mark.parametrize("multiple", [1, 4])
def test_layers_of_convolutions_are_handed_out_with_their_channels_last(selector_type, multiple):
    shapes = [(6, 5, 3, 3), (9, 7), (8, 6, 1, 1), (4, 8, 2, 5)]
    layers = [replace(layer, convolution=len(layer.shape) == 4) for layer in layout_of(shapes).layers]
    layout = Layout(tuple(layers))
    arrangement = Arrangement(layout, channels_last=True, multiple=multiple)
    draw = torch.Generator().manual_seed(0)
    weights, scores = torch.randn(layout.size, generator=draw), torch.randn(layout.size, generator=draw)
    selector = selector_type(arrangement, counts(layout, 0.3))
    for again in (False, False, True, True, False):
        scores = (scores.detach() + 0.1 * torch.randn(layout.size, generator=draw)).requires_grad_()
        found = selector.masked_layers(scores, weights)
        wanted = arrangement.tensors(arrangement(expected(scores, weights, layout, 0.3)))
        inflows = []
        if again:  # the gradient must not depend on this
            selector.masked_layers(scores + 1, weights)
        for name, part in found.items():
            assert torch.equal(part, wanted[name])
            if part.ndim == 4:
                assert part.is_contiguous(memory_format=torch.channels_last)
            inflows.append(torch.randn(part.shape, generator=draw))  # the wrong order of memory
        torch.autograd.backward(list(found.values()), inflows)
        cut = [inflow[tuple(map(slice, layer.shape))] for inflow, layer in zip(inflows, layers, strict=True)]
        inflow = torch.cat([part.reshape(-1) for part in cut])
        assert torch.equal(scores.grad, reference.score_gradient(scores.detach(), weights, inflow))
        del found, part
        assert torch.equal(selector.masked_weights(scores, weights), expected(scores, weights, layout, 0.3))


@selectors
def test_layers_are_the_pieces_of_the_vector_in_their_shapes(selector_type):
    layout = layout_of([(7, 30), (20, 5)])
    draw = torch.Generator().manual_seed(0)
    selector = selector_type(Arrangement(layout), (21, 10))
    weights, scores = (torch.randn(layout.size, generator=draw) for _ in range(2))
    scores.requires_grad_()
    for used in (slice(None), slice(1, None)):  # all layers, or not the first
        scores.grad = None
        layers = selector.masked_layers(scores, weights)
        wanted = expected(scores, weights, layout, 0.1)
        assert {name: part.shape for name, part in layers.items()} == {"layer0": (7, 30), "layer1": (20, 5)}
        assert torch.equal(layout.vector(layers), wanted)
        inflows = [torch.randn(part.T.shape, generator=draw).T for part in layers.values()]  # not contiguous
        torch.autograd.backward(list(layers.values())[used], inflows[used])
        if used.start:
            inflows[0] = torch.zeros(7, 30)
        inflow = torch.cat([inflow.reshape(-1) for inflow in inflows])
        assert torch.equal(scores.grad, reference.score_gradient(scores.detach(), weights, inflow))
        assert torch.equal(selector.masked_weights(scores, weights), wanted)


@pytest.mark.parametrize(("name", "side", "steps"), [("lenet-300-100", 28, 10), ("resnet18", 8, 4)])
def test_training_with_the_compiled_selector_and_without_is_the_same(name, side, steps, monkeypatch):
    def scores_after_training():
        network = MaskedNetwork(build(name, (1, side, side), 2), seed=1)
        network.execute(replace(CPU, masked_linear=False))  # its products may round differently
        scored = ScoredSubnetwork(network, "task", 2)
        optimizer = torch.optim.Adam(scored.parameters(), 0.01)
        x = torch.rand(32, 1, side, side, generator=torch.Generator().manual_seed(0))
        for _ in range(steps):
            loss = scored.logits(x, training=True).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return type(scored._selector), scored.scores.detach()

    compiled, found = scores_after_training()
    monkeypatch.setitem(sys.modules, "exssnet.engine.cpu.selection_numba", None)  # an import of it fails now
    plain, wanted = scores_after_training()
    assert (compiled, plain) == (CompiledSelector, BandSelector)
    assert torch.equal(found, wanted)


def test_the_compiler_is_imported_only_when_a_task_is_learned():
    program = "import sys, exssnet, exssnet.cli; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@selectors
def test_the_band_is_enough_for_almost_all_steps_of_training(selector_type, monkeypatch):
    layout, keep = layout_of([(20_000,), (3_000,)]), (2_000, 300)
    selector = selector_type(Arrangement(layout), keep)
    whole = []
    real = np.partition
    monkeypatch.setattr(np, "partition", lambda values, place: whole.append(len(values)) or real(values, place))
    draw = torch.Generator().manual_seed(0)
    scores, weights = torch.rand(layout.size, generator=draw) - 0.5, torch.ones(layout.size)
    for _ in range(200):
        scores = scores + 0.002 * torch.randn(layout.size, generator=draw)
        selector.masked_weights(scores, weights)
    assert whole[:2] == [20_000, 3_000]  # the first step knows nothing
    assert sum(size in (20_000, 3_000) for size in whole[2:]) < 4
    assert sum(whole[2:]) < 0.05 * 200 * 23_000


@pytest.mark.parametrize("size", [100_003, 235_200])
def test_masks_of_large_layers_equal_the_reference(size):
    scores = torch.rand(size, generator=torch.Generator().manual_seed(0)) - 0.5  # 24-bit draws: a few ties
    layout = layout_of([(size,)])
    assert torch.equal(select(scores, layout, counts(layout, 0.1)), reference.mask(scores, 0.1))


@given(shapes, densities, st.integers(0, 2**31))
def test_straight_through_gradients_equal_the_reference(shapes, density, seed):
    layout = layout_of(shapes)
    draw = torch.Generator().manual_seed(seed)
    scores, weights, inflow = (torch.randn(layout.size, generator=draw) for _ in range(3))
    scores.requires_grad_()
    effective = masked_weights(scores, weights, layout, counts(layout, density))
    effective.backward(inflow)
    assert torch.equal(scores.grad, reference.score_gradient(scores.detach(), weights, inflow))


def test_gradients_reach_weights_that_are_masked_out():
    layout = layout_of([(10,)])
    scores = torch.linspace(0.1, 1, 10, requires_grad=True)
    masked_weights(scores, torch.ones(10), layout, (1,)).sum().backward()
    assert (scores.grad == 1).all()


@given(st.integers(1, 10_000), densities)
def test_keep_counts_equal_the_reference(size, density):
    layout = layout_of([(size,)])
    if density * size >= 1.001:
        assert keep_counts(layout, density) == (reference.keep(size, density),)


def test_density_is_taken_as_the_decimal_it_was_written_as():
    assert keep_counts(layout_of([(10,)]), 0.9) == (9,)  # in floats (1 - 0.9) * 10 is below 1


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, float("nan"), float("inf")])
def test_density_out_of_range_is_refused(density):
    with pytest.raises(InputError, match="density is"):
        keep_counts(layout_of([(100,)]), density)


def test_density_that_leaves_a_layer_without_a_weight_is_refused_with_the_least_that_works():
    with pytest.raises(InputError, match=r"layer1 \(50 weights\) without a weight: use at least 0.02"):
        keep_counts(layout_of([(1000,), (50,)]), 0.01)
    assert keep_counts(layout_of([(1000,), (50,)]), 0.02) == (20, 1)


def test_masked_out_weights_are_plain_zeros():
    kept = keep_only(torch.tensor([-1.0, -2.0]), torch.tensor([True, False]))
    assert torch.equal(torch.signbit(kept), torch.tensor([True, False]))


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=3))
def test_the_density_that_the_error_advises_is_accepted(sizes):
    layout = layout_of([(size,) for size in sizes])
    with pytest.raises(InputError, match="use at least") as error:
        keep_counts(layout, 1e-9)
    assert min(keep_counts(layout, float(str(error.value).split()[-1]))) >= 1
