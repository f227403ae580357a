"""Learned values among weights that stay, held to a plain scatter and gather."""

import sys
from dataclasses import replace

import pytest
import torch

from exssnet.core.layout import Layer, Layout
from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import OwnSubnetwork, ScoredSubnetwork
from exssnet.engine.execution import CPU
from exssnet.engine.memory_format import Arrangement
from exssnet.models import build

pytest.importorskip("numba", reason="needs numba")

from exssnet.engine.cpu.values_numba import LearnedWeights

LAYOUT = Layout((Layer("a", (7, 30), 30, 0, False), Layer("b", (3, 5), 5, 210, False), Layer("c", (2,), 1, 225, False)))


def drawn(dtype=torch.float32, share=0.3):
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(LAYOUT.size, generator=draw) < 0.5
    fixed = torch.randn(LAYOUT.size, generator=draw, dtype=dtype) * mask
    places = (mask & (torch.rand(LAYOUT.size, generator=draw) < share)).nonzero().view(-1)
    values = torch.randn(len(places), generator=draw, dtype=dtype)
    return fixed, mask, places, values.requires_grad_(), draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_values_and_gradients_are_those_of_a_scatter_and_a_gather(dtype, share):
    fixed, mask, places, values, draw = drawn(dtype, share)
    weights = LearnedWeights(Arrangement(LAYOUT), fixed, mask, places)
    for _ in range(3):
        parts = weights.by_layer(values)
        whole = fixed.index_put((places,), values.detach())
        assert [tuple(part.shape) for part in parts.values()] == [layer.shape for layer in LAYOUT.layers]
        assert torch.equal(torch.cat([part.reshape(-1) for part in parts.values()]), whole)
        inflow = torch.randn(LAYOUT.size, generator=draw, dtype=dtype)
        values.grad = None
        torch.cat([part.reshape(-1) for part in parts.values()]).backward(inflow)
        assert torch.equal(values.grad, inflow[places])
        del parts
        values = (values.detach() - 0.1).requires_grad_()


def test_a_gradient_that_does_not_lie_in_order_is_read_as_it_is():
    fixed, mask, places, values, _ = drawn()
    parts = LearnedWeights(Arrangement(LAYOUT), fixed, mask, places).by_layer(values)
    (parts["a"].t().contiguous() * torch.arange(210.0).view(30, 7)).sum().backward()  # a transposed inflow
    wanted = torch.zeros(LAYOUT.size)
    wanted[:210] = torch.arange(210.0).view(30, 7).t().reshape(-1)
    assert torch.equal(values.grad, wanted[places])


def test_what_somebody_keeps_stays_as_it_is_and_what_nobody_keeps_is_written_over():
    fixed, mask, places, values, _ = drawn()
    weights = LearnedWeights(Arrangement(LAYOUT), fixed, mask, places)
    kept = weights.by_layer(values)["a"]
    as_it_was = kept.detach().clone()
    second = weights.by_layer(values.detach() + 1)["a"]
    assert torch.equal(kept, as_it_was)
    assert kept.data_ptr() != second.data_ptr()
    place = second.data_ptr()
    del kept, second
    assert weights.by_layer(values)["a"].data_ptr() == place


def test_a_gradient_of_the_gradient_is_refused():
    fixed, mask, places, values, _ = drawn()
    parts = LearnedWeights(Arrangement(LAYOUT), fixed, mask, places).by_layer(values)
    whole = torch.cat([part.reshape(-1) for part in parts.values()])
    (gradient,) = torch.autograd.grad(whole.square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def values_after_steps(name, side, turned=False):
    network = MaskedNetwork(build(name, (1, side, side), 3))
    network.execute(replace(CPU, masked_linear=False))  # its products may round differently
    scored = ScoredSubnetwork(network, "task", 3)
    mask = scored.mask()
    index = mask.nonzero().view(-1)
    index = index.flip(0) if turned else index
    part = OwnSubnetwork(network, "task", 3, scored.own, mask, index, network.weights[index])
    x = torch.rand(64, 1, side, side, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(part.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        part.logits(x, training=True).square().sum().backward()
        optimizer.step()
    return part.values.detach().flip(0) if turned else part.values.detach()


@pytest.mark.parametrize(("name", "side"), [("lenet-300-100", 28), ("resnet18", 8)])
def test_values_are_learned_as_without_numba_bit_for_bit(name, side, monkeypatch):
    ours = values_after_steps(name, side)
    assert torch.equal(values_after_steps(name, side, turned=True), ours)  # places in another order go the plain way
    monkeypatch.setitem(sys.modules, "exssnet.engine.cpu.values_numba", None)  # an import of it fails now
    assert torch.equal(values_after_steps(name, side), ours)


def test_a_network_whose_weights_are_all_used_has_nothing_to_learn_and_still_runs():
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3))
    index = torch.zeros(0, dtype=torch.int64)
    own = network.start_private("task", 3)
    part = OwnSubnetwork(network, "task", 3, own, torch.ones_like(network.bank.used), index, network.weights[index])
    plain = network.run(network.layers(network.weights), own, 3, x := torch.rand(2, 1, 28, 28), training=False)
    assert part.parameters() == []
    assert torch.equal(part.logits(x, training=False), plain)
