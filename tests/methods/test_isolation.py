"""PackNet, Piggyback and WSN: what each trains, what it keeps, and that nothing else moves."""

from dataclasses import replace

import pytest
import torch
from tests.core.networks import mlp, task
from tests.methods.isolated import config, every_head, layers, outcome
from tests.parts import need
from tests.stopping import cut_after
from tests.train.test_loop import batches
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, linear, relu

from exssnet.core import reference
from exssnet.core.engine import Engine
from exssnet.core.network import MaskedNetwork
from exssnet.core.proof import digests_of
from exssnet.core.subnetwork import OwnSubnetwork
from exssnet.engine import choose
from exssnet.engine.cpu.engine import CpuEngine
from exssnet.engine.cuda.engine import CudaEngine
from exssnet.engine.cuda.runner import Options
from exssnet.errors import InputError
from exssnet.experiments.config import resolve
from exssnet.experiments.prepare import prepare
from exssnet.experiments.recipes import recipe, recipes
from exssnet.experiments.run import run
from exssnet.methods import parse, transfers
from exssnet.methods.masks._subnetworks import ThresholdSubnetwork, WinningSubnetwork
from exssnet.methods.masks.packnet import PackNetSettings
from exssnet.methods.masks.piggyback import PiggybackSettings
from exssnet.methods.masks.wsn import WsnSettings
from exssnet.models import build
from exssnet.train import Trainer, TrainSettings

NAMES = ("packnet", "piggyback", "wsn")
every_method = pytest.mark.parametrize("name", NAMES)

# --- what all three promise -----------------------------------------------------------------------------------


@every_method
@every_head
def test_earlier_tasks_keep_every_bit_of_logits_weights_and_mask(name, head):
    stream, method = prepare(config(name, head=head))
    trainer = Trainer(method, 0)
    before = {}
    for index in range(3):
        trainer.learn(stream[index])
        own, x = f"task{index + 1}", stream[index].test.batch(torch.arange(60))[0]
        before[own] = (x, method.logits(x, own), dict(method.network.tasks[own].digests))
    for own, (x, logits, digests) in before.items():
        assert torch.equal(method.logits(x, own), logits)
        effective = method.network.effective(own)
        assert method.network.tasks[own].digests == digests == digests_of(effective | method.network.tasks[own].private)
    assert method.verify().verified


@every_method
@every_head
def test_every_task_is_learned_well_above_chance(tmp_path, name, head):
    record = run(resolve("split-digits", name, 0, head=head, tasks=3), tmp_path)
    assert min(record["accuracy_matrix"][-1]) > 80  # of three and four classes
    assert record["forgetting"] == 0
    assert record["zero_forgetting"]["verified"]
    assert record["transfer"] is None


@every_method
@pytest.mark.parametrize("network", [{}, {"network": "resnet18", "width": 4.0}])
@every_head
def test_a_run_that_is_cut_off_in_any_epoch_resumes_to_the_same_record(tmp_path, monkeypatch, name, network, head):
    short = config(name, head=head, epochs=2, retrain_epochs=2, tasks=2, samples_per_class=20, **network)
    whole = run(short, tmp_path / "whole")
    planned = 2 * parse(name)[0].settings_type(**short.settings).epochs_per_task
    assert (tmp_path / "whole" / short.folder / "log.jsonl").read_text().count('"event": "epoch"') == planned
    for epochs in range(1, planned):
        with cut_after(monkeypatch, epochs):
            run(short, tmp_path / f"{epochs}", checkpoint_seconds=0)
        assert outcome(run(short, tmp_path / f"{epochs}")) == outcome(whole)


@every_method
@pytest.mark.parametrize("benchmark", recipes())
def test_a_recipe_trains_it_as_long_as_the_other_methods_and_without_kkt(name, benchmark):
    assert not transfers(name)
    settings = parse(name)[0].settings_type(**resolve(benchmark, name, 0, device="cpu").settings)
    assert settings.epochs_per_task == recipe(benchmark)["methods"]["*"]["epochs"]


PHASES = {  # of the first task and of a later one: name, epochs, rate
    "packnet": [[("train", 3, 0.1), ("retrain", 2, 0.3)]] * 2,
    "piggyback": [[("train", 3, 0.1)], [("mask", 3, 0.2)]],
    "wsn": [[("train", 3, 0.1)]] * 2,
}
SETTINGS = {
    "packnet": PackNetSettings(epochs=3, lr=0.1, retrain_epochs=2, retrain_lr=0.3),
    "piggyback": PiggybackSettings(epochs=3, lr=0.1, mask_lr=0.2),
    "wsn": WsnSettings(epochs=3, lr=0.1),
}


@every_method
def test_every_phase_has_its_own_epochs_and_rate(name):
    method, found = parse(name)[0](mlp(), SETTINGS[name], 0), []
    for number in range(2):
        found.append([(phase.name, phase.epochs, phase.lr) for phase in method.phases(task(number))])
        method.end_task(task(number))
    assert found == PHASES[name]


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ENGINES = [
    pytest.param(CpuEngine(), "cpu", id="cpu"),
    pytest.param(CudaEngine(Options(None, kernels=False)), "cpu", id="padded channels"),
    pytest.param(CudaEngine(Options(torch.bfloat16, kernels=False)), "cuda", id="bf16", marks=[pytest.mark.gpu, gpu]),
]


def subnetworks(network):
    """One of each kind, for a second task; the first has left some weights used."""

    def drawn():
        return torch.rand(network.layout.size).to(network.device)

    OwnSubnetwork.dense(network, "first", 3).pruned(drawn() < 0.3).commit()
    yield OwnSubnetwork.dense(network, "a", 3)
    yield OwnSubnetwork.dense(network, "a", 3).pruned(drawn() < 0.5)
    threshold = ThresholdSubnetwork(network, "a", 3, 0.01, 0.005)
    with torch.no_grad():
        threshold.real.copy_(0.01 * drawn())
    yield threshold
    yield WinningSubnetwork(network, "a", 3, torch.randn(network.layout.size))


@pytest.mark.parametrize(("engine", "device"), ENGINES)
@pytest.mark.parametrize("number", range(4))
def test_every_engine_gives_the_plain_logits_and_gradients(engine, device, number):
    torch.manual_seed(0)
    module = build("resnet18", (3, 12, 12), 4, width=5)
    x = torch.randn(6, 3, 12, 12)
    found = []
    for used in (Engine(), engine):
        network = MaskedNetwork(module, density=0.3, init="keep", head="task")
        network.to(device).use(used)
        torch.manual_seed(1)
        subnetwork = list(subnetworks(network))[number]
        logits = subnetwork.logits(x.to(device), training=True)
        logits.square().sum().backward()
        gradients = [p.grad for p in subnetwork.parameters()]
        assert len(gradients) == 2 + (number == 3)  # the learned vectors, and the task's head
        statistics = [b for b in subnetwork.buffers().values() if b.is_floating_point()]
        found.append([logits.detach(), *gradients, *statistics])
    for plain, other in zip(*found, strict=True):
        one, two = plain.double().view(-1), other.double().view(-1)
        if device == "cuda":  # eighteen layers deep, a gradient keeps its direction and no more
            assert cosine_similarity(one, two, 0) > 0.7
        else:
            assert (one - two).norm() <= 1e-4 * one.norm()


# --- Piggyback ------------------------------------------------------------------------------------------------


def plain_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30, bias=False), nn.ReLU(), nn.Linear(30, 2, bias=False))


def plain_forward(effective, x):
    return linear(relu(linear(x, effective[0])), effective[1])


def test_piggyback_gradient_is_that_of_the_masked_weight_times_the_weight():
    network = MaskedNetwork(plain_mlp(), 1.0, init="keep")
    masked = ThresholdSubnetwork(network, "a", 2, 0.01, 0.005)
    with torch.no_grad():
        masked.real.copy_(0.02 * torch.rand(network.layout.size) - 0.005)  # also below zero
    x, y = task(0).train.batch(torch.arange(64))
    cross_entropy(masked.logits(x, training=True), y).backward()
    weights, real = layers(network, network.weights), layers(network, masked.real.detach())
    effective = [(w * (r > 0.005)).requires_grad_() for w, r in zip(weights, real, strict=True)]
    inflow = torch.autograd.grad(cross_entropy(plain_forward(effective, x), y), effective)
    oracle = torch.cat([(g * w).view(-1) for g, w in zip(inflow, weights, strict=True)])
    assert int(oracle.count_nonzero()) > int(masked.mask().sum())  # also of weights that are masked out
    assert torch.allclose(masked.real.grad, oracle, rtol=1e-5, atol=1e-8)


def test_after_the_first_task_of_piggyback_no_weight_moves():
    stream, method = prepare(config("piggyback"))
    trainer = Trainer(method, 0)
    start = method.network.weights.clone()
    trainer.learn(stream[0])
    trained = method.network.weights.clone()
    assert not torch.equal(trained, start)
    assert bool(method.network.mask("task1").all())
    (real,) = next(method.phases(stream[1])).parameters
    assert real.unique().tolist() == [pytest.approx(0.01)]
    assert bool(method.subnetwork.mask().all())  # it begins with all weights
    for index in (1, 2):
        trainer.learn(stream[index])
        mask = method.network.mask(f"task{index + 1}")
        assert torch.equal(method.network.weights, trained)
        assert 0 < int(mask.sum()) < len(mask)
        assert method.network.tasks[f"task{index + 1}"].trained_weights == 0
    assert method.storage()["weight_bits"] == 32 * len(trained)


# --- WSN ------------------------------------------------------------------------------------------------------


def engine_of(kind):
    """Engines that select in ways of their own."""
    if kind == "triton":
        need("triton", "the kernels' own tests need Triton: pip install triton")
        if torch.cuda.is_available():
            pytest.skip("not for a machine with a GPU: the kernels run there")
        return CudaEngine(Options(None, kernels=True))
    return {"plain": Engine(), "cpu": CpuEngine()}[kind]


@pytest.mark.filterwarnings("default")  # of Triton's interpreter
@pytest.mark.parametrize("kind", ["plain", "cpu", "triton"])
def test_wsn_gradients_are_those_of_edge_popup_and_of_the_free_weights_in_the_mask(kind):
    network = MaskedNetwork(plain_mlp(), 0.3, init="keep")
    network.use(engine_of(kind))
    WinningSubnetwork(network, "first", 2, torch.randn(network.layout.size)).fixed().commit()
    winning = WinningSubnetwork(network, "a", 2, torch.randn(network.layout.size))
    x, y = task(0).train.batch(torch.arange(64))
    for _ in range(2):  # the fast selections go by the step before
        for parameter in winning.parameters():
            parameter.grad = None
        cross_entropy(winning.logits(x, training=True), y).backward()
        scores, used = layers(network, winning.scores.detach()), layers(network, network.bank.used)
        masks = [reference.mask(s, 0.3) for s in scores]
        weights = network.weights.clone()
        weights[winning.index] = winning.values.detach()
        weights = layers(network, weights)
        effective = [(w * m).requires_grad_() for w, m in zip(weights, masks, strict=True)]
        inflow = torch.autograd.grad(cross_entropy(plain_forward(effective, x), y), effective)
        to_scores = [reference.score_gradient(s, w, g) for s, w, g in zip(scores, weights, inflow, strict=True)]
        to_weights = torch.cat([(g * m)[~u] for g, m, u in zip(inflow, masks, used, strict=True)])
        assert torch.equal(winning.mask(), torch.cat([m.view(-1) for m in masks]))
        assert torch.allclose(winning.scores.grad, torch.cat([g.view(-1) for g in to_scores]), rtol=1e-5, atol=1e-8)
        assert torch.allclose(winning.values.grad, to_weights, rtol=1e-5, atol=1e-8)
        assert not winning.values.grad[~winning.mask()[winning.index]].any()
        with torch.no_grad():
            winning.scores -= 0.5 * winning.scores.grad.sign()
            winning.values -= 0.1 * winning.values.grad.sign()


def test_wsn_trains_weights_and_scores_of_a_task_as_plain_pytorch_does():
    settings, new = WsnSettings(epochs=4, lr=0.01, density=0.3), [task(0), task(1)]
    method = parse("wsn")[0](plain_mlp(), settings, seed=0)
    network = method.network
    plain_adam = TrainSettings(32, lambda p, lr: torch.optim.Adam(p, lr, foreach=False))
    Trainer(method, 0, plain_adam).learn(new[0])
    weights = [w.clone() for w in layers(network, network.weights)]
    scores = [s.clone() for s in layers(network, method.scores["last"])]
    used = [u.clone() for u in layers(network, network.bank.used)]
    moving = [w.clone().requires_grad_() for w in weights]
    adam = torch.optim.Adam([*scores, *moving], 0.01, foreach=False)
    for epoch, found in enumerate(batches(new[1], "train", 4, 0)):
        adam.param_groups[0]["lr"] = reference.cosine(0.01, epoch, 4)
        for x, y in found:
            masks = [reference.mask(s, 0.3) for s in scores]
            whole = [torch.where(u, w, m) for u, w, m in zip(used, weights, moving, strict=True)]
            effective = [(w * m).detach().requires_grad_() for w, m in zip(whole, masks, strict=True)]
            inflow = torch.autograd.grad(cross_entropy(plain_forward(effective, x), y), effective)
            for s, p, w, m, u, g in zip(scores, moving, whole, masks, used, inflow, strict=True):
                s.grad, p.grad = reference.score_gradient(s, w.detach(), g), g * m * ~u
            adam.step()
    Trainer(method, 0, plain_adam).learn(new[1])
    masks = [reference.mask(s, 0.3) for s in scores]
    assert torch.equal(network.mask("task-1"), torch.cat([m.view(-1) for m in masks]))
    found = zip(layers(network, network.weights), weights, moving, masks, used, strict=True)
    for now, before, trained, mask, u in found:
        new = mask & ~u
        assert int(mask.sum()) > int(new.sum()) > 0  # earlier weights are used too
        assert torch.allclose(now[new], trained[new], atol=1e-6)
        assert torch.equal(now[~new], before[~new])  # what is used, and what was trained but not selected


def test_wsn_scores_go_on_from_task_to_task():
    stream, method = prepare(config("wsn", epochs=1))
    Trainer(method, 0).learn(stream[0])
    first = method.network.mask("task1")
    next(method.phases(stream[1]))
    assert torch.equal(method.subnetwork.mask(), first)
    assert method.storage()["score_bits"] == 32 * method.network.layout.size


def test_wsn_goes_on_without_a_free_weight():
    method = parse("wsn")[0](mlp(), WsnSettings(epochs=2, density=1.0), seed=0)
    for number in range(2):
        Trainer(method, 0, TrainSettings(32)).learn(task(number))
    assert [t.trained_weights for t in method.network.tasks.values()] == [method.network.layout.size, 0]


# --- settings, and a GPU --------------------------------------------------------------------------------------

WRONG = [
    (PackNetSettings, "retrain_epochs", -1), (PackNetSettings, "retrain_epochs", 1.5), (PackNetSettings, "epochs", 0),
    (PackNetSettings, "retrain_lr", 0.0), (PiggybackSettings, "mask_lr", -1.0), (PiggybackSettings, "start", 0.005),
    (PiggybackSettings, "threshold", float("nan")), (WsnSettings, "lr", float("inf")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_settings_that_make_no_sense_are_refused_by_name(kind, name, value):
    with pytest.raises(InputError, match=f"^{name} is"):
        kind(**{name: value})


@pytest.mark.gpu
@gpu
@every_method
def test_captured_steps_give_what_single_steps_give_bit_for_bit(name, monkeypatch):
    def learned():
        torch.manual_seed(0)
        method = parse(name)[0](mlp(), parse(name)[0].settings_type(epochs=3), 0)
        method.to("cuda").use(choose("cuda"))
        for new in (task(0), task(1)):
            Trainer(method, 0, TrainSettings(32)).learn(replace(new, train=new.train.to("cuda")))
        return [learned.digests for learned in method.network.tasks.values()]

    graph = learned()
    monkeypatch.setattr(CudaEngine, "loop", Engine.loop)
    assert learned() == graph
