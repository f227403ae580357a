import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exssnet.core import reference
from exssnet.core.layout import Layer, Layout
from exssnet.core.selection import keep_counts, keep_only, masked_weights, select
from exssnet.core.selection_cpu import BandSelector
from exssnet.errors import InputError

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


@given(
    shapes, densities, st.integers(0, 2**31), st.sampled_from([0, 2, 1000]),
    st.lists(st.sampled_from([0.0, 0.001, 0.05, 3.0]), min_size=1, max_size=6),
)  # fmt: skip
def test_masks_of_scores_that_move_equal_the_reference_in_every_step(shapes, density, seed, levels, moves):
    layout = layout_of(shapes)
    draw = torch.Generator().manual_seed(seed)
    selector = BandSelector(layout, counts(layout, density))
    scores = torch.randn(layout.size, generator=draw)
    weights = torch.randn(layout.size, generator=draw)
    for move in moves:
        scores = scores + move * torch.randn(layout.size, generator=draw)
        if levels:
            scores = (scores * levels).round() / levels  # ties
        variable = scores.clone().requires_grad_()
        masked = selector.masked_weights(variable, weights)
        inflow = torch.randn(layout.size, generator=draw)
        masked.backward(inflow)
        wanted = torch.cat([reference.mask(piece, density) for piece in layout.slices(scores)])
        assert torch.equal(masked, torch.where(wanted, weights, 0.0))
        assert torch.equal(variable.grad, reference.score_gradient(scores, weights, inflow))


def test_the_band_is_enough_for_almost_all_steps_of_training(monkeypatch):
    layout, keep = layout_of([(20_000,), (3_000,)]), (2_000, 300)
    selector = BandSelector(layout, keep)
    whole = []
    real = np.partition
    monkeypatch.setattr(np, "partition", lambda values, place: whole.append(len(values)) or real(values, place))
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(layout.size, generator=draw) - 0.5
    for _ in range(200):
        scores = scores + 0.002 * torch.randn(layout.size, generator=draw)
        selector.mask(scores)
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
