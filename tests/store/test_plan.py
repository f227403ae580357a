"""What `plan` expects, against random masks and against what learning really leaves and writes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.networks import mlp
from tests.store.small import create, examples, learn

from exssnet import InputError
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import select
from exssnet.store.plan import entropy_bits, fitting_density, plan, running_low


def network(used: float = 0.0) -> MaskedNetwork:
    net = MaskedNetwork(mlp(inputs=60, hidden=80), 0.1, init="hashed", head="task")
    if used:
        add(net, "before", torch.rand(net.layout.size) < used)
    return net


def add(net: MaskedNetwork, name: str, mask: torch.Tensor) -> None:
    index = net.bank.free(mask).nonzero().view(-1)
    net.commit(name, 2, mask, index, torch.randn(len(index)), net.start_private(name, 2))


def random_mask(net: MaskedNetwork) -> torch.Tensor:
    return select(torch.rand(net.layout.size), net.layout, net.keep)


@given(st.integers(1, 12), st.floats(0.03, 0.4), st.floats(0, 0.7), st.integers(0, 1000))
@settings(max_examples=25)
def test_random_masks_leave_as_many_free_weights_as_expected(tasks: int, density: float, used: float, seed: int):
    torch.manual_seed(seed)
    net = network(used)
    found = plan(net, tasks, density)
    net.set_density(density)
    trained = net.bank.free_count
    for number in range(tasks):
        mask = random_mask(net)
        overlap = net.bank.overlap(mask)
        add(net, str(number), mask)
    assert net.bank.free_count == pytest.approx(found.expected, rel=0.05, abs=0.02 * found.size)
    assert (trained - net.bank.free_count) * 4 == pytest.approx(found.weight_bytes, rel=0.1, abs=0.08 * found.size)
    if used or tasks > 1:
        assert overlap == pytest.approx(found.overlap, abs=0.08)
    for layer, free in zip(found.layers, net.layout.slices(~net.bank.used), strict=True):
        assert int(free.count_nonzero()) == pytest.approx(layer.expected, rel=0.1, abs=0.03 * layer.size)


@pytest.mark.parametrize(("tasks", "used"), [(1, 0.0), (2, 0.0), (10, 0.0), (5, 0.3), (40, 0.1)])
def test_at_the_fitting_density_the_last_task_finds_half_of_its_weights_free(tasks: int, used: float):
    torch.manual_seed(0)
    net = network(used)
    fitting = plan(net, tasks, 0.1).fitting
    assert 1 - plan(net, tasks, fitting).overlap >= 0.49
    if fitting < 1:
        assert 1 - plan(net, tasks, min(1.0, fitting * 1.2)).overlap < 0.5
    net.set_density(fitting)
    for number in range(tasks):
        mask = random_mask(net)
        share = net.bank.free(mask).count_nonzero() / mask.count_nonzero()
        add(net, str(number), mask)
    assert float(share) >= 0.45 if fitting == 1.0 else float(share) == pytest.approx(0.5, abs=0.05)


def test_no_density_fits_where_less_than_half_is_free():
    assert fitting_density(0.49, 3) is None
    assert fitting_density(0.5, 1) == 1.0
    assert fitting_density(0.5, 4) == 0.0
    torch.manual_seed(0)
    assert plan(network(0.6), 3, 0.1).fitting is None


def test_a_mask_costs_its_entropy():
    assert entropy_bits(1000, 500) == pytest.approx(1000)
    assert entropy_bits(1000, 1000) == 0
    assert entropy_bits(1000, 100) == pytest.approx(469, abs=0.1)


@pytest.mark.parametrize("method", ["exssnet", "supsup"])
@pytest.mark.parametrize("start", [0, 2])
def test_the_bytes_expected_are_the_bytes_that_learning_writes(tmp_path: Path, method: str, start: int):
    model = create(tmp_path / "model", input=(64,), width=0.4, method=method, density=0.1)
    data = [examples(number, inputs=64) for number in range(start + 4)]
    for number in range(start):
        model.learn(f"task{number}", data[number], epochs=(1, 1))
    expected, before = model.plan(4), model.summary()["bytes"]
    assert (expected.weight_bytes == 0) == (method == "supsup")
    for number in range(start, start + 4):
        model.learn(f"task{number}", data[number], epochs=(1, 1))
    assert model.summary()["bytes"] - before == pytest.approx(expected.bytes, rel=0.1)
    assert model.model.network.bank.free_count == pytest.approx(expected.expected, rel=0.05)


def test_planning_changes_nothing_and_refuses_what_makes_no_sense(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "a", 1)
    weights = model.model.network.weights.clone()
    found = model.plan(3, 0.4)
    assert (found.tasks, found.density) == (3, 0.4)
    assert found.free == model.model.network.bank.free_count
    assert found.bytes == pytest.approx(sum(dataclasses.asdict(found)[f"{part}_bytes"] for part in
                                            ("mask", "weight", "private", "card")))  # fmt: skip
    assert torch.equal(model.model.network.weights, weights)
    assert model.model.network.density == 0.2
    for tasks, density in ((0, 0.1), (-1, 0.1), (2, 0.0), (2, 1.2)):
        with pytest.raises(InputError):
            model.plan(tasks, density)


def test_a_full_network_is_planned_too(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "all", 1, density=1.0)
    found = model.plan(2)
    assert (found.free, found.expected, found.weight_bytes, found.overlap, found.fitting) == (0, 0, 0, 1.0, None)
    assert running_low(model.model.network).startswith("only 0 % of the weights are free")
