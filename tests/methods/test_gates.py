"""Gates on the units of any module, and what both methods that gate units share."""

from dataclasses import replace

import pytest
import torch
from tests.methods.gated import both, digits, made, task, toy
from tests.stopping import cut_after
from torch import nn

from exssnet.core.engine import Engine
from exssnet.engine.cuda.engine import CudaEngine
from exssnet.engine.cuda.runner import Options
from exssnet.errors import InputError
from exssnet.experiments.config import resolve
from exssnet.experiments.prepare import prepare
from exssnet.experiments.run import run
from exssnet.methods import methods
from exssnet.methods.gates._units import gated
from exssnet.methods.gates.hat import Attention
from exssnet.models import build
from exssnet.train import Trainer

OPTIONS = Options(None, kernels=False)

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
    with pytest.raises(InputError, match="is used twice"):
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
    for name, buffer in network.statistics.items():
        if name.endswith("running_mean"):
            buffer.normal_(generator=draw)
    other = network.weights.detach() + free * torch.randn(len(free), generator=draw)
    x = torch.randn(5, *shape, generator=draw)

    def outputs(weights, used):
        return network(x, training=False, weights=weights, statistics=method.with_statistics(method._named(used)))

    assert torch.equal(outputs(network.weights, on), outputs(other, on))
    assert not torch.equal(outputs(network.weights, on), outputs(other, 1 - on))


# --- both methods -----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("head", ["task", "shared"])
def test_a_task_begins_with_a_head_and_norm_statistics_that_no_task_has_trained(name, head):
    module = toy(9 if head == "task" else 3)
    module.insert(1, nn.BatchNorm1d(5))
    method = made(name, module, head)
    network = method.network
    first = {name: rows.clone() for name, rows in method._head(network.start).items()}
    Trainer(method, 0).learn(task(0))
    trained = method.private_of("task1")
    assert all(not torch.equal(trained[f"head/{name}"], rows[:3]) for name, rows in first.items())
    next(method.phases(task(1)))
    assert all(torch.equal(rows, first[name]) for name, rows in method._head(network.weights).items())
    norms = {name.rpartition("_")[2]: buffer for name, buffer in network.statistics.items() if "running" in name}
    assert norms["mean"].tolist() == [0] * 5
    assert norms["var"].tolist() == [1] * 5


@both
@pytest.mark.parametrize("norm", [False, True])
def test_storage_counts_the_shared_weights_once_and_what_each_task_owns(name, norm):
    module = toy()
    if norm:
        module.insert(1, nn.BatchNorm1d(5))
    method = made(name, module)
    trainer = Trainer(method, 0)
    gates = {"hat": 9, "cgate": 16 * (6 + 1 + 5 + 5 + 1 + 4) + 9}[name]
    for count in (1, 2):
        trainer.learn(task(count - 1))
        own = 32 * (gates + 3 * 4 + 3) + (8 * 9 if name == "cgate" else 0) + norm * (32 * 2 * 5 + 64)  # and its batches
        weights = 32 * (6 * 5 + 5 + 5 * 4 + 4 + norm * 2 * 5)
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
def test_networks_with_and_without_gates_do_not_share_what_is_made_for_a_structure(name):
    """The engine for a GPU, here without its kernels: with one for all of them each learns what it learns alone."""
    kinds = ("naive", name, {"hat": "cgate", "cgate": "hat"}[name])
    alone = {kind: outcome(kind, CudaEngine(OPTIONS)) for kind in kinds}
    shared = CudaEngine(OPTIONS)
    for kind in (*kinds, *kinds):
        assert torch.equal(outcome(kind, shared), alone[kind])


def outcome(kind, engine):
    stream, method = digits(kind, engine=engine, epochs=1)
    Trainer(method, 0).learn(stream[0])
    return method.logits(stream[0].test.batch(torch.arange(40))[0], "task1")


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
    monkeypatch.setattr("exssnet.engine.cuda.engine.CudaEngine.loop", Engine.loop)
    single = learned()
    assert torch.equal(captured.network.weights, single.network.weights)
    assert all(torch.equal(tensor, single.private[key]) for key, tensor in captured.private.items())
