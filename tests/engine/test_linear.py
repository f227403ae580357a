"""The product that passes over masked weights, held to the dense one."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork
from exssnet.engine.cpu import linear
from exssnet.engine.execution import CPU, PLAIN
from exssnet.models import build

pytest.importorskip("numba", reason="needs numba")

from exssnet.engine.cpu import linear_numba


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(batch, rows, width, density, seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=draw) < density
    weight = torch.randn(rows, width, generator=draw, dtype=dtype) * mask
    return torch.randn(batch, width, generator=draw, dtype=dtype), weight, linear.packed(mask.view(-1))


@given(
    batch=st.integers(1, 140), rows=st.integers(1, 9), width=st.integers(1, 450), density=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]), seed=st.integers(0, 2**20),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_product_is_the_dense_one_up_to_rounding(batch, rows, width, density, dtype, seed):
    x, weight, words = drawn(batch, rows, width, density, seed, dtype)
    tiny = 1e-5 if dtype is torch.float32 else 1e-13
    assert torch.allclose(linear_numba.product(x, weight, None, words), x @ weight.t(), rtol=tiny, atol=30 * tiny)


def test_inputs_that_do_not_lie_in_order_are_read_as_they_are():
    x, weight, words = drawn(64, 5, 300, 0.2, 0)
    turned = x.t().contiguous().t()
    assert not turned.is_contiguous()
    assert torch.equal(linear_numba.product(turned, weight, None, words), linear_numba.product(x, weight, None, words))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [52, 64, 120])
def test_outputs_and_gradients_of_a_layer_are_those_of_a_plain_one(batch, bias):
    x, weight, words = drawn(batch, 7, 200, 0.1, 1)
    found = []
    for kind in (nn.Linear, linear.MaskedLinear):
        layer, inputs = kind(200, 7, bias=bias), x.clone().requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(weight)
            if bias:
                layer.bias.copy_(torch.arange(7))
        layer.weight.masked = linear.Masked(words)
        out = layer(inputs)
        out.square().sum().backward()
        found.append([out, inputs.grad, layer.weight.grad, *([layer.bias.grad] if bias else [])])
    for plain, ours in zip(*found, strict=True):
        assert torch.allclose(plain, ours, rtol=1e-4, atol=1e-4)


def products(monkeypatch):
    """How often the product is asked for from now on."""
    calls, product = [], linear_numba.product
    monkeypatch.setattr(linear_numba, "product", lambda *arguments: calls.append(1) or product(*arguments))
    return calls


NOT_PAYING = {
    "few examples": torch.zeros(51, 200), "a few more than fit": torch.zeros(65, 200), "none": torch.zeros(0, 200),
    "sequences": torch.zeros(2, 64, 200),
}  # fmt: skip


@pytest.mark.parametrize("x", NOT_PAYING.values(), ids=NOT_PAYING)
def test_where_it_does_not_pay_or_fit_the_product_is_dense(x, monkeypatch):
    calls = products(monkeypatch)
    _, _, words = drawn(1, 7, 200, 0.1, 1)
    layer = linear.MaskedLinear(200, 7)
    layer.weight.masked = linear.Masked(words)
    layer(x)
    torch.set_num_threads(2)
    layer(torch.zeros(64, 200))
    torch.set_num_threads(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(64, 200)).dtype is torch.bfloat16
    assert not calls
    layer(torch.zeros(64, 200))
    assert calls


def test_an_input_of_another_type_is_refused_as_ever():
    _, _, words = drawn(1, 7, 200, 0.1, 1)
    layer = linear.MaskedLinear(200, 7)
    layer.weight.masked = linear.Masked(words)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.zeros(64, 200, dtype=torch.float64))


def learned(execution, steps=6):
    """Scores of LeNet before and after some steps on noise, then values."""
    torch.manual_seed(0)
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3))
    network.execute(execution)
    x, y = torch.rand(64, 1, 28, 28), torch.arange(64) % 3
    scored = ScoredSubnetwork(network, "task", 3)
    found = []
    for make in (lambda: scored, lambda: WeightSubnetwork(scored, torch.ones_like(network.bank.used))):
        part = make()
        start = part._learned().detach().clone()
        optimizer = torch.optim.SGD(part.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(part.logits(x, training=True), y).backward()
            optimizer.step()
        found.append((start, part._learned().detach()))
    return found


def test_a_mask_and_weights_are_learned_as_with_dense_products(monkeypatch):
    plain = learned(PLAIN)
    calls = products(monkeypatch)
    ours = learned(CPU)
    assert len(calls) == 12  # one large layer
    assert_moved_alike(plain, ours)


def assert_moved_alike(plain, ours):
    for (start, a), (_, b) in zip(plain, ours, strict=True):
        assert (a - b).norm() < 1e-4 * (a - start).norm()


def test_without_numba_weights_are_learned_with_dense_products(monkeypatch):
    ours = learned(CPU)
    for name in ("selection_numba", "values_numba"):
        monkeypatch.setitem(sys.modules, f"exssnet.engine.cpu.{name}", None)  # an import of it fails now
    calls = products(monkeypatch)
    plain = learned(CPU)
    assert not calls
    assert_moved_alike(plain, ours)


def test_masks_are_handed_out_only_where_they_help():
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3))
    given = ScoredSubnetwork(network, "task", 3).layers()
    assert [name for name, weight in given.items() if weight.masked is not None] == [network.layout.layers[0].name]
    dense = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3), density=0.5)
    assert all(weight.masked is None for weight in ScoredSubnetwork(dense, "task", 3).layers().values())


def with_a_learned_task(density=0.1, execution=CPU):
    torch.manual_seed(0)
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3), density)
    network.execute(execution)
    WeightSubnetwork(ScoredSubnetwork(network, "task", 3), torch.ones_like(network.bank.used)).commit()
    return network


def test_a_learned_task_passes_over_what_its_mask_leaves_out(monkeypatch):
    x, plain = torch.rand(500, 1, 28, 28), with_a_learned_task(execution=PLAIN)
    dense = [plain.logits(x, "task"), plain.features(x, "task")]
    calls = products(monkeypatch)
    network = with_a_learned_task()
    ours = [network.logits(x, "task"), network.features(x, "task")]
    torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2  # one large layer
    masks = {name: weight.masked.bits for name, weight in network.ready("task").items() if hasattr(weight, "masked")}
    assert list(masks) == [network.layout.layers[0].name]
    (bits,) = masks.values()
    assert (bits == linear.packed(network.layout.slices(network.mask("task"))[0])).all()


def test_what_a_task_has_apart_from_the_shared_weights_is_not_passed_over():
    x, network = torch.rand(64, 1, 28, 28), with_a_learned_task()
    places = network.mask("task").nonzero().view(-1)[:100]
    network.tasks["task"].apart = (places, torch.linspace(1, 2, 100))
    network.ready.let_go()
    ours = network.logits(x, "task")
    network.execute(PLAIN)
    torch.testing.assert_close(ours, network.logits(x, "task"), rtol=1e-4, atol=1e-4)


def test_a_learned_task_is_computed_densely_where_its_mask_does_not_help(monkeypatch):
    calls = products(monkeypatch)
    x = torch.rand(64, 1, 28, 28)
    with_a_learned_task(density=0.5).logits(x, "task")
    assert not any(hasattr(weight, "masked") for weight in with_a_learned_task(execution=PLAIN).ready("task").values())
    torch.set_num_threads(2)
    assert not any(hasattr(weight, "masked") for weight in with_a_learned_task().ready("task").values())
    torch.set_num_threads(1)
    monkeypatch.delattr("exssnet.engine.cpu.linear_numba")
    monkeypatch.setitem(sys.modules, "exssnet.engine.cpu.linear_numba", None)  # an import of it fails now
    with_a_learned_task().logits(x, "task")
    assert not calls


def test_weights_that_somebody_keeps_keep_their_masks():
    network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3))
    network.execute(CPU)
    scored = ScoredSubnetwork(network, "task", 3)
    x = torch.rand(64, 1, 28, 28)
    kept = scored.layers()
    before = network.run(kept, scored.own, 3, x, training=False)
    scored.scores.data.mul_(-1).add_(0.01)
    scored.layers()
    assert torch.equal(network.run(kept, scored.own, 3, x, training=False), before)


def gradients_of(part, x, y, twice=False):
    """The gradient of the scores after one backward pass, through the network once or twice."""
    part.scores.grad = None
    layers = part.layers()
    logits = [
        part.network.run(layers, part.own, 3, some, training=True) for some in ((x, x.flip(0)) if twice else (x,))
    ]
    sum(nn.functional.cross_entropy(some, y) for some in logits).backward()
    return part.scores.grad


def both_ways():
    """The same scores, computed plainly and as on a CPU, and a batch."""
    parts = []
    for execution in (PLAIN, CPU):
        torch.manual_seed(0)
        network = MaskedNetwork(build("lenet-300-100", (1, 28, 28), 3))
        network.execute(execution)
        parts.append(ScoredSubnetwork(network, "task", 3))
    return *parts, torch.rand(64, 1, 28, 28), torch.arange(64) % 3


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_those_of_dense_products_also_where_a_layer_is_used_twice(twice, monkeypatch):
    plain, ours, x, y = both_ways()
    calls = products(monkeypatch)
    found = gradients_of(ours, x, y, twice)
    assert len(calls) == 1 + twice
    assert torch.allclose(found, gradients_of(plain, x, y, twice), rtol=1e-4, atol=1e-7)


def test_gradients_that_somebody_keeps_stay_and_those_of_two_passes_add_up():
    _, ours, x, y = both_ways()
    first = gradients_of(ours, x, y)
    before = first.clone()
    second = gradients_of(ours, x.flip(0), y)
    assert torch.equal(first, before)
    assert not torch.equal(second, before)
    both = second.clone() + before
    nn.functional.cross_entropy(ours.logits(x, training=True), y).backward()  # ours.scores.grad is `second`
    assert torch.allclose(ours.scores.grad, both, rtol=1e-4, atol=1e-7)


def test_a_backward_pass_after_a_later_forward_pass_has_the_gradients_of_its_own():
    _, ours, x, y = both_ways()
    wanted = gradients_of(ours, x, y).clone()
    ours.scores.grad = None
    early = nn.functional.cross_entropy(ours.logits(x, training=True), y)
    late = nn.functional.cross_entropy(ours.logits(x.flip(0), training=True), y)
    early.backward()
    assert torch.allclose(ours.scores.grad, wanted, rtol=1e-4, atol=1e-7)
    ours.scores.grad = None
    late.backward()
    assert torch.allclose(ours.scores.grad, gradients_of(both_ways()[0], x.flip(0), y), rtol=1e-4, atol=1e-7)


def test_a_layers_gradient_that_somebody_keeps_stays():
    _, ours, x, y = both_ways()
    layers = ours.layers()
    kept = []
    next(iter(layers.values())).register_hook(kept.append)
    nn.functional.cross_entropy(ours.network.run(layers, ours.own, 3, x, training=True), y).backward()
    ours.scores.grad = None
    before = kept[0].clone()
    gradients_of(ours, x.flip(0), y)
    assert torch.equal(kept[0], before)
