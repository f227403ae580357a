"""Conditional channel gates: their rules against oracles written out, and what later tasks may not touch."""

import pytest
import torch
from tests.methods.gated import batch_of, begun, digits, examples, made, task, toy
from torch import nn

from exssnet.errors import ForgettingError
from exssnet.experiments.config import resolve
from exssnet.experiments.run import run
from exssnet.methods.gates.cgate import TEMPERATURE, opened
from exssnet.train import Trainer, TrainSettings


def seen_gates(method, x, named):
    """All gates [B, units] for some inputs."""
    statistics = method.with_statistics(named)
    with torch.no_grad():
        return method.network(x, training=False, statistics=statistics)[:, method.outputs_of.size :]


@pytest.mark.parametrize("network", [{}, {"network": "resnet18", "width": 4.0, "sparsity": 20.0}])
def test_gates_are_open_or_closed_and_closed_units_give_nothing(network):
    stream, method = digits("cgate", epochs=3, **network)
    Trainer(method, 0).learn(stream[0])
    x, _ = stream[0].test.batch(torch.arange(60))
    private = method.private_of("task1")
    gates = seen_gates(method, x, method.test_gates(private["gates"], private))
    assert gates.shape == (60, len(method.used))
    assert set(gates.unique().tolist()) == {0.0, 1.0}
    drawn = torch.randn(60, len(method.used), generator=torch.Generator().manual_seed(0))
    everything = torch.ones_like(method.used)
    some = seen_gates(method, x, method._named(private["gates"], drawn, everything))
    assert set(some.unique().tolist()) == {0.0, 1.0}
    shut = seen_gates(method, x, method._named(private["gates"], drawn, 1 - private["allowed"].float()))
    assert not shut[:, private["allowed"]].any()


def test_a_gate_is_decided_by_its_own_small_network():
    method = made("cgate")
    next(method.phases(task()))
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    gates = seen_gates(method, x, method.test_gates(method.gates, {}))
    parts = {n: t.detach() for n, t in method.gate_layout.tensors(method.gates).items()}
    weights = method.network.layout.tensors(method.network.weights.detach())
    at, prefix = 0, "module."
    for number in (0, 2):
        name, units = f"{prefix}{number}", len(weights[f"{prefix}{number}.layer.weight"])
        inner = torch.relu(x @ parts[f"{name}.first"].T + parts[f"{name}.first_bias"])
        expected = (inner @ parts[f"{name}.second"].T + parts[f"{name}.second_bias"] > 0).float()
        assert torch.equal(gates[:, at : at + units], expected)
        x = torch.relu((x @ weights[f"{name}.layer.weight"].T + weights[f"{name}.layer.bias"]) * expected)
        at += units


def test_a_learned_task_opens_no_unit_that_it_did_not_freeze_whatever_its_gates_say():
    method = made("cgate")
    Trainer(method, 0).learn(task())
    allowed = torch.tensor([1, 0, 1, 0, 1, 0, 0, 1, 1]).bool()  # 5 and 4 units
    method.private["task1/allowed"] = allowed
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    own, closed = method.private_of("task1"), 0
    parts = method.gate_layout.tensors(own["gates"])
    weights = method.network.layout.tensors(method.network.weights.detach())
    hidden = x
    for number, held in ((0, allowed[:5]), (2, allowed[5:])):
        name = f"module.{number}"
        inner = torch.relu(hidden @ parts[f"{name}.first"].T + parts[f"{name}.first_bias"])
        wanted = inner @ parts[f"{name}.second"].T + parts[f"{name}.second_bias"] > 0
        closed += int((wanted & ~held).sum())
        hidden = torch.relu(hidden @ weights[f"{name}.layer.weight"].T + weights[f"{name}.layer.bias"])
        hidden = hidden * (wanted & held)
    assert closed > 20  # gates that would be open
    logits = hidden @ own["head/module.4.weight"].T + own["head/module.4.bias"]
    assert torch.allclose(method.logits(x, "task1"), logits, atol=1e-5)


def test_the_gradient_goes_straight_through_a_gate():
    scores = torch.linspace(-4, 4, 17, dtype=torch.float64, requires_grad=True)
    gates = opened(scores)
    assert gates.tolist() == [float(score > 0) for score in scores.tolist()]
    (slope,) = torch.autograd.grad(gates.sum(), scores)
    soft = 1 / (1 + torch.exp(-scores / TEMPERATURE))
    assert torch.allclose(slope, (soft * (1 - soft) / TEMPERATURE).detach())


def test_the_sparsity_loss_is_the_mean_share_of_open_gates_over_the_layers():
    method = made("cgate", sparsity=2.0)
    gates = torch.tensor([[1.0, 1, 0, 0, 0, 1, 1, 1, 0], [1.0, 0, 0, 0, 0, 1, 0, 0, 0]])  # 5 and 4 units
    outputs = torch.cat([torch.zeros(2, 9), gates], 1)
    assert method.open_share(outputs).item() == pytest.approx((3 / 10 + 4 / 8) / 2)
    free, priced = (begun("cgate", sparsity=sparsity) for sparsity in (0.0, 2.0))
    difference = priced.loss(batch_of(examples())) - free.loss(batch_of(examples()))
    draw = torch.rand(40, 9, generator=torch.Generator().manual_seed(0))
    named = free._named(free.gates, torch.log(draw / (1 - draw)), torch.ones(9))
    share = free.open_share(
        torch.cat([torch.zeros(40, 9), seen_gates(free, examples().batch(torch.arange(40))[0], named)], 1)
    )
    assert difference.item() == pytest.approx(2 * share.item(), abs=1e-5)


def test_the_gates_are_drawn_with_the_probability_of_a_sigmoid():
    draw = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    for score in (-1.0, 0.0, 2.0):
        rate = opened(score + torch.logit(draw, eps=1e-6)).mean().item()
        assert rate == pytest.approx(torch.sigmoid(torch.tensor(score)).item(), abs=0.005)


@pytest.mark.parametrize(
    "network", [{}, {"network": "resnet18", "width": 8.0, "epochs": 4, "sparsity": 3.0, "gate_rate": 30.0}]
)
def test_frozen_units_keep_their_weights_and_earlier_tasks_their_outputs_bit_for_bit(network):
    stream, method = digits("cgate", **network)
    trainer = Trainer(method, 0, TrainSettings(optimizer="adamw", weight_decay=0.1))
    before, shown, frozen = {}, {}, torch.zeros_like(method.free, dtype=torch.bool)
    for index in range(3):
        earlier = method.network.weights.detach().clone()
        trainer.learn(stream[index])
        now = method.network.weights.detach()
        assert torch.equal(earlier[frozen], now[frozen])
        free = method.freedom(method.used, settled=True) == 1
        assert torch.equal(now[free], method.network.start[free])  # the others start again
        assert (~free & ~frozen).any()
        assert not torch.equal(now[~free & ~frozen], method.network.start[~free & ~frozen])
        frozen = ~free
        shown[index] = stream[index].test.batch(torch.arange(80))[0]
        before[index] = method.logits(shown[index], f"task{index + 1}")
    assert 0.05 < method.used.mean() < 1
    for index in range(3):
        assert torch.equal(method.logits(shown[index], f"task{index + 1}"), before[index])
    method.verify().require()


def test_a_unit_is_frozen_if_its_gate_opens_for_more_than_the_given_share_of_the_examples():
    kept = {}
    for share in (0.0, 0.5):
        stream, method = digits("cgate", epochs=3, frozen_share=share)
        Trainer(method, 0).learn(stream[0])
        kept[share] = method.private["task1/allowed"]
        assert torch.equal(method.used.bool(), kept[share])
        # the first layer's gates see nothing of other gates, nor of weights that have been set back since
        units = method.layers[0].units
        x, _ = stream[0].train.batch(torch.arange(len(stream[0].train)))
        named = method._named(method.gates, torch.zeros_like(method.used), torch.ones_like(method.used))
        found = seen_gates(method, x, named)[:, :units].mean(0)
        assert torch.equal(found > share, kept[share][:units])
    assert kept[0.5].sum() < kept[0.0].sum()
    assert not (kept[0.5] & ~kept[0.0]).any()


def test_tasks_are_learned_well_above_chance_and_kept(tmp_path):
    record = run(resolve("split-digits", "cgate", 0, tasks=3, epochs=10), tmp_path)
    assert min(record["accuracy_matrix"][2]) > 85
    assert record["forgetting"] == 0
    assert record["zero_forgetting"]["verified"]


def test_a_frozen_weight_or_a_tensor_of_a_task_that_was_changed_is_found():
    module = toy()
    module.insert(1, nn.BatchNorm1d(5))
    method, again = (made("cgate", module) for _ in range(2))
    Trainer(method, 0).learn(task())
    tensors, facts = method.state()
    again.load_state(tensors, facts)
    assert again.verify().verified
    frozen = (method.freedom(method.used, settled=True) == 0).nonzero()[0]
    changed = tensors["network.weights"].clone()
    changed[frozen] += 1
    with pytest.raises(ForgettingError, match="task 'task1' changed"):
        again.load_state({**tensors, "network.weights": changed}, facts)
    own = [name for name in tensors if name.startswith("private.task1/")]
    assert {name.partition("task1/")[2].partition("/")[0] for name in own} == {"gates", "allowed", "head", "buffer"}
    for name in own:  # what is the task's alone
        changed = tensors[name].clone()
        changed.view(-1)[0] = not changed.view(-1)[0]
        with pytest.raises(ForgettingError, match="task 'task1' changed"):
            again.load_state({**tensors, name: changed}, facts)
