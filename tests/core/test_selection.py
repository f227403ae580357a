"""Masks, their gradients and densities, against the reference."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exssnet.core import reference
from exssnet.core.layout import Layer, Layout
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import keep_counts, keep_only, masked_weights, select
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork
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


def expected(scores, weights, layout, density):
    """The weights under the reference's mask."""
    mask = torch.cat([reference.mask(piece, density) for piece in layout.slices(scores.detach())])
    return torch.where(mask, weights, 0.0)


def test_a_task_whose_scores_are_no_numbers_is_refused_after_steps_with_them():
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 2))
    scored = ScoredSubnetwork(network, "task", 2)
    scored.scores.data[:30_000] = torch.nan
    scored.logits(torch.zeros(2, 1, 28, 28), training=True).sum().backward()
    with pytest.raises(InputError, match="not numbers any more"):
        WeightSubnetwork(scored, None)


def test_the_compiler_is_imported_only_when_a_task_is_learned():
    program = "import sys, exssnet, exssnet.cli; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


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
