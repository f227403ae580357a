"""The methods that gate units: their rules against oracles written out, and what later tasks may not touch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.stopping import cut_after
from torch import nn

from exssnet.core.gated import gated
from exssnet.data import TensorData
from exssnet.data.task import Outline, Task
from exssnet.data.tensors import Shared
from exssnet.errors import ForgettingError, InputError
from exssnet.experiments.config import resolve
from exssnet.experiments.run import prepare, run
from exssnet.methods import methods
from exssnet.methods.base import Batch
from exssnet.methods.cgate import TEMPERATURE, opened
from exssnet.methods.hat import Attention, attention
from exssnet.models import build
from exssnet.train import Trainer, TrainSettings
from exssnet.train import loop as loop_module
from exssnet.train.steps import _sizes

CLASSES = (3, 3, 3)
HAT_TOLERANCE = 0.05  # earlier logits of an MLP, in standard deviations of those logits; measured: at most 0.013
HAT_TOLERANCE_RESIDUAL = 0.5  # of a ResNet, with more attention left undecided; measured: at most 0.30

both = pytest.mark.parametrize("name", ["hat", "cgate"])


def examples(count=40, shape=(6,), seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, *shape, generator=draw) + y.view(-1, *[1] * len(shape))
    return TensorData(Shared(x), torch.arange(count), y, 3)


def task(index=0, **options):
    data = examples(seed=index, **options)
    return Task(index, f"task{index + 1}", (0, 1, 2), data, data)


def toy(outputs=9):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))


def made(name, module=None, head="task", **changes):
    kind = methods()[name]
    torch.manual_seed(0)
    module = module or toy(kind.outputs(head, CLASSES))
    settings = kind.settings_type(**({"epochs": 2, "lr": 0.01} | changes))
    return kind(module, settings, 0, head, Outline(CLASSES))


def batch_of(data, size=None):
    index = torch.arange(size or len(data))
    return Batch(*data.batch(index), data, index, torch.Generator().manual_seed(0))


def begun(name, used=None, **options):
    """In the middle of a second task, the units used so far by the first."""
    method = made(name, **options)
    method.tasks.append("earlier")
    if used is not None:
        method.used.copy_(used)
    next(method.phases(task(1)))
    return method


def digits(name, seed=0, **changes):
    return prepare(resolve("split-digits", name, seed, **({"tasks": 3, "epochs": 10, "device": "cpu"} | changes)))


# --- gates on any module ----------------------------------------------------------------------------------------------


def pictures(outputs=9):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2)),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 7),
        nn.ReLU(),
        nn.Linear(7, outputs),
    )


def residual(outputs=9):
    return build("resnet18", (2, 8, 8), outputs, 4)


def test_the_units_of_a_chain_are_followed_and_those_of_a_sum_are_not():
    _, layers = gated(pictures(), Attention)
    assert [(layer.name, layer.units, layer.inputs, layer.source) for layer in layers] == [
        ("0", 4, 2, None),
        ("4.0", 6, 4, 0),
        ("6", 5, 24, 1),
        ("8", 7, 5, None),  # a layer norm makes every unit depend on all
    ]
    _, layers = gated(residual(), Attention)
    known = [layer.name for layer in layers if layer.source is not None]
    assert len(layers) == 20
    assert known == [f"stages.{stage}.{block}.body.3" for stage in range(4) for block in range(2)]


def test_a_copy_is_gated_with_its_norms_and_without_its_head():
    module = pictures()
    copied, _ = gated(module, Attention)
    assert type(module[0]) is nn.Conv2d
    assert isinstance(copied[0].norm, nn.BatchNorm2d)
    assert isinstance(copied[1], nn.Identity)
    assert isinstance(copied[7], nn.LayerNorm)  # of all units together: stays behind the gate
    assert type(copied[-1]) is nn.Linear
    x = torch.randn(3, 2, 8, 8)
    assert torch.equal(copied.eval()(x), module.eval()(x))  # attention 1 changes nothing


def test_a_module_that_cannot_be_gated_is_refused():
    with pytest.raises(InputError, match="nothing to gate"):
        gated(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), Attention)
    layer = nn.Linear(4, 4)
    with pytest.raises(InputError, match="second place"):
        gated(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2)), Attention)


@pytest.mark.parametrize(("module", "shape"), [(toy, (6,)), (pictures, (2, 8, 8)), (residual, (2, 8, 8))])
@pytest.mark.parametrize("seed", range(3))
def test_weights_that_are_free_to_move_have_no_effect_where_their_units_are_off(module, shape, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = made("hat", module())
    network = method.network
    on = torch.randint(0, 2, (len(method.used),), generator=draw).float()
    free = method.freedom(on, settled=True)
    assert set(free.unique().tolist()) == {0.0, 1.0}
    for rows in method._head(free).values():
        rows.zero_()  # a task's own, and not looked at here
    for name, buffer in network.buffers.items():
        if name.endswith("running_mean"):
            buffer.normal_(generator=draw)
    other = network.weights.detach() + free * torch.randn(len(free), generator=draw)
    x = torch.randn(5, *shape, generator=draw)
    buffers = {**network.buffers, **method._named(on)}
    before, after = (network.run(x, training=False, weights=w, buffers=buffers) for w in (network.weights, other))
    assert torch.equal(before, after)
    assert not torch.equal(
        before, network.run(x, training=False, weights=other, buffers=network.buffers | method._named(1 - on))
    )


@both
def test_norm_statistics_and_outputs_are_each_tasks_own(name):
    stream, method = digits(name, network="resnet18", width=4.0, epochs=2, head="shared")
    trainer = Trainer(method, 0)
    for index in range(2):
        trainer.learn(stream[index])
    first, second = (method.private_of(f"task{number}") for number in (1, 2))
    own = [n for n in first if n.endswith("running_var") or n.startswith("head/")]
    assert len(own) == 21
    assert all(not torch.equal(first[n][:3], second[n][:3]) for n in own)


@both
def test_storage_counts_the_shared_weights_once_and_what_each_task_owns(name):
    method = made(name)
    trainer = Trainer(method, 0)
    gates = {"hat": 9, "cgate": 16 * (6 + 1 + 5 + 5 + 1 + 4) + 9}[name]
    for count in (1, 2):
        trainer.learn(task(count - 1))
        own = 32 * (gates + 3 * 4 + 3) + (8 * 9 if name == "cgate" else 0)
        weights = 32 * (6 * 5 + 5 + 5 * 4 + 4)
        assert method.storage() == {"weight_bits": weights, "private_bits": count * own, "method_bits": 32 * 9}


@both
@pytest.mark.parametrize("width", [None, 4.0])
def test_a_run_that_was_cut_off_inside_a_task_goes_on_to_the_same_record(tmp_path, monkeypatch, name, width):
    network = {} if width is None else {"network": "resnet18", "width": width}
    config = resolve("split-digits", name, 0, tasks=3, epochs=4, optimizer="adamw", **network)
    whole = run(config, tmp_path / "whole")
    with cut_after(monkeypatch, 6):
        run(config, tmp_path / "cut", checkpoint_seconds=0)
    rest = run(config, tmp_path / "cut", checkpoint_seconds=0)
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}


@both
def test_a_network_without_gates_in_the_same_process_is_another_one(name):
    for other in ("naive", name, "naive"):
        stream, method = digits(other, epochs=1)
        Trainer(method, 0).learn(stream[0])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("hat", {"s_max": 0.0}), ("hat", {"strength": -1.0}), ("hat", {"gate_rate": 0.0}),
        ("cgate", {"sparsity": -0.1}), ("cgate", {"frozen_share": 1.0}), ("cgate", {"gate_units": 0}),
        ("cgate", {"gate_rate": float("nan")}),
    ],
)  # fmt: skip
def test_settings_without_sense_are_refused(name, wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        methods()[name].settings_type(**wrong)


# --- hard attention to the task ---------------------------------------------------------------------------------------


def test_a_step_is_scaled_by_one_minus_the_smaller_attention_of_a_weights_two_ends():
    used = torch.tensor([0.0, 1.0, 0.3, 1.0, 0.6, 1.0, 0.2, 0.0, 0.9])  # 5 and 4 units
    method = begun("hat", used)
    before = method.network.layout.tensors(method.network.weights.detach().clone())
    method.loss(batch_of(examples())).backward()
    slope = method.network.layout.tensors(method.network.weights.grad)
    torch.optim.SGD([method.network.weights], 0.1).step()
    method.hold()
    after = method.network.layout.tensors(method.network.weights.detach())

    def check(name, place, freedom):
        expected = before[name][place] - 0.1 * freedom * slope[name][place]
        assert after[name][place].item() == pytest.approx(expected.item(), abs=1e-6)
        assert freedom > 0 or after[name][place] == before[name][place]

    first, second = used[:5].tolist(), used[5:].tolist()
    for i in range(5):
        check("0.layer.bias", (i,), 1 - first[i])
        for pixel in range(6):
            check("0.layer.weight", (i, pixel), 1 - first[i])
    for j in range(4):
        check("2.layer.bias", (j,), 1 - second[j])
        for i in range(5):
            check("2.layer.weight", (j, i), 1 - min(second[j], first[i]))
        for row in range(9):
            check("4.weight", (row, j), 1)
    again = method.network.weights.detach().clone()
    method.hold()
    assert torch.equal(method.network.weights, again)


def test_the_price_of_attention_is_its_share_among_units_that_no_task_uses():
    used = torch.tensor([0.0, 1.0, 0.3, 1.0, 0.6, 1.0, 0.2, 0.0, 0.9])
    cheap, dear = (begun("hat", used, strength=strength) for strength in (1.0, 3.0))
    batches = [batch_of(examples()) for _ in range(2)]
    difference = dear.loss(batches[1]) - cheap.loss(batches[0])
    a = [1 / (1 + torch.exp(-400 * e)).item() for e in dear.gates.detach().double()]  # one batch an epoch: s_max
    share = sum(x * (1 - u) for x, u in zip(a, used.tolist(), strict=True)) / sum(1 - u for u in used.tolist())
    assert difference.item() == pytest.approx(2 * share, abs=1e-5)


@given(st.integers(2, 300), st.integers(1, 70))
def test_attention_gets_steeper_from_the_first_batch_of_each_epoch_to_its_last(count, size):
    method = made("hat", s_max=50.0)
    data = examples(count)
    for _ in range(2):
        s = [method.steepness(batch_of(data, n)).item() for n in _sizes(count, size)]
        assert s == sorted(s)
        assert s[-1] == pytest.approx(50)
        assert len(s) == 1 or s[0] == pytest.approx(1 / 50)


def test_the_gradient_of_an_embedding_is_compensated_as_in_the_paper():
    weigh = torch.randn(25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for s in (1 / 400, 0.5, 5.0, 400.0):
        bound = min(6, 10 / s)  # beyond it the paper's product of a tiny and a huge number loses its digits
        e = torch.linspace(-bound, bound, 25, dtype=torch.float64, requires_grad=True)
        a = torch.sigmoid(s * e)
        (plain,) = torch.autograd.grad((weigh * a).sum(), e)
        expected = 400 / s * (torch.cosh(s * e) + 1) / (torch.cosh(e) + 1) * plain
        ours = attention(e, torch.tensor(s), 400.0)
        assert torch.allclose(ours, a, rtol=1e-6)
        (found,) = torch.autograd.grad((weigh * ours).sum(), e)
        assert torch.allclose(found, expected.detach(), rtol=1e-6)


@pytest.mark.parametrize(
    ("network", "tolerance"),
    [({}, HAT_TOLERANCE), ({"network": "resnet18", "width": 4.0, "epochs": 6}, HAT_TOLERANCE_RESIDUAL)],
)
def test_attention_holds_earlier_tasks_to_the_stated_tolerance(network, tolerance):
    stream, method = digits("hat", **network)
    trainer = Trainer(method, 0, TrainSettings(optimizer="adamw", weight_decay=0.1))
    before, shown, held = {}, {}, None
    for index in range(3):
        place = method.network.weights.detach().clone()
        trainer.learn(stream[index])
        if held is not None:  # weights between units that are used in full
            assert held.any()
            assert torch.equal(place[held], method.network.weights[held])
        held = method.freedom(method.used, settled=True) == 0
        shown[index] = stream[index].test.batch(torch.arange(80))[0]
        before[index] = method.logits(shown[index], f"task{index + 1}")
    for index in range(2):
        moved = (method.logits(shown[index], f"task{index + 1}") - before[index]).abs().max()
        assert moved < tolerance * before[index].std()


def test_embeddings_stay_in_their_bounds():
    method = made("hat", gate_rate=1000.0)
    Trainer(method, 0).learn(task())
    assert method.private["task1/gates"].abs().max() == 6


# --- conditional channel gates ----------------------------------------------------------------------------------------


def seen_gates(method, x, named):
    """All gates [B, units] for some inputs."""
    buffers = {**method.network.buffers, **named}
    with torch.no_grad():
        return method.network.run(x, training=False, buffers=buffers)[:, method.outputs_of.size :]


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
        place = method.network.weights.detach().clone()
        trainer.learn(stream[index])
        now = method.network.weights.detach()
        assert torch.equal(place[frozen], now[frozen])
        free = method.freedom(method.used, settled=True) == 1
        assert torch.equal(now[free], method.network.start[free])  # the others start anew
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


def test_a_frozen_weight_that_was_changed_is_found():
    stream, method = digits("cgate", epochs=2)
    Trainer(method, 0).learn(stream[0])
    tensors, facts = method.state()
    _, again = digits("cgate", epochs=2)
    again.load_state(tensors, facts)
    assert again.verify().verified
    frozen = (method.freedom(method.used, settled=True) == 0).nonzero()[0]
    changed = tensors["weights"].clone()
    changed[frozen] += 1
    with pytest.raises(ForgettingError, match="task 'task1' changed"):
        again.load_state({**tensors, "weights": changed}, facts)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_captured_steps_give_what_single_steps_give(monkeypatch, name, compiled):
    def learned():
        config = resolve("split-digits", name, 0, tasks=3, epochs=3, network="resnet18", width=8.0, device="cuda")
        stream, method = prepare(replace(config, compile=compiled))
        trainer = Trainer(method, 0)
        for index in range(2):
            new = stream[index]
            trainer.learn(replace(new, train=new.train.to("cuda"), test=new.test.to("cuda")))
        return method

    captured = learned()
    monkeypatch.setattr(loop_module, "capturable", lambda *_: False)
    single = learned()
    assert torch.equal(captured.network.weights, single.network.weights)
    assert all(torch.equal(tensor, single.private[key]) for key, tensor in captured.private.items())
