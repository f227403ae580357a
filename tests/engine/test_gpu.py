"""The engine of a GPU against the reference and the plain way. Needs a CUDA device."""

import copy
import gc
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from tests.core.networks import mlp, task
from tests.stopping import cut_after
from torch import nn

import exssnet
from exssnet.core import reference, transfer
from exssnet.core.engine import Engine, Loop
from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import keep_counts, select
from exssnet.core.transfer import scores_from_mask
from exssnet.data import HorizontalFlip, Normalize, Pipeline, RandomCrop, Task, TensorData
from exssnet.data.tensors import Shared
from exssnet.engine import choose
from exssnet.errors import InputError
from exssnet.experiments.config import resolve
from exssnet.experiments.prepare import computing
from exssnet.experiments.together import run_all
from exssnet.methods import parse
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.models import build
from exssnet.train import Listener, Trainer, TrainSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
WAYS = {  # number type, our kernels, batches for which the step is compiled
    "fp32, padded": (None, False, 0),
    "bf16, padded": (BF16, False, 0),
    "bf16, kernels": (BF16, True, 0),
    "fp32, kernels": (None, True, 0),
    "compiled": (BF16, True, 60),
}
KERNELS = [way for way, (_, kernels, _) in WAYS.items() if kernels]


def engine(way, captured=True):
    from exssnet.engine.cuda.engine import CudaEngine
    from exssnet.engine.cuda.runner import Options

    class Eager(CudaEngine):
        def loop(self, step):
            return Loop(step)

    return (CudaEngine if captured else Eager)(Options(*WAYS[way]))


def learned(engine, module, number=2, batch_size=32, method="exssnet+kkt", **sizes):
    torch.manual_seed(0)
    settings = MaskSettings(density=0.2, mask_epochs=3, weight_epochs=3, kkt=method.endswith("+kkt"))
    method = parse(method)[0](module(), settings, 0)
    method.to("cuda")
    method.use(engine)
    trainer = Trainer(method, 0, TrainSettings(batch_size))
    for index in range(number):
        new = task(index, **sizes)
        trainer.learn(replace(new, train=new.train.to("cuda"), test=new.test.to("cuda")))
    return method.network


def digests(network):
    network.verify().require()
    return {name: learned.digests for name, learned in network.tasks.items()}


def test_captured_steps_give_what_single_steps_give_bit_for_bit():
    way = "fp32, kernels"
    assert digests(learned(engine(way), mlp)) == digests(learned(engine(way, captured=False), mlp))


def test_a_step_that_runs_the_network_twice_is_captured_right(monkeypatch):
    """Weights are made together with the batch, but only once: what comes after may still read them."""
    kind = parse("exssnet+kkt")[0]
    once = kind.loss
    monkeypatch.setattr(kind, "loss", lambda self, batch: once(self, batch) + 0.5 * once(self, batch))
    way = "fp32, kernels"
    assert digests(learned(engine(way), mlp)) == digests(learned(engine(way, captured=False), mlp))


def pictures():
    y = torch.arange(256) % 2
    x = (60 * torch.rand(256, 3, 16, 16, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    x += (100 * y[:, None, None, None]).to(torch.uint8)
    pipeline = Pipeline((RandomCrop(2), HorizontalFlip(), Normalize.unit()))
    data = TensorData(Shared(x), torch.arange(256), y, 2, pipeline).to("cuda")
    return Task(0, "a", (0, 1), data, data)


def learned_pictures(engine, module=None):
    new = pictures()
    settings = MaskSettings(density=0.3, mask_epochs=10, weight_epochs=10)
    torch.manual_seed(0)
    method = parse("exssnet")[0](module or build("resnet18", (3, 16, 16), 2, width=12), settings, 0)
    method.to("cuda")
    method.use(engine)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        Trainer(method, 0, TrainSettings(60)).learn(new)
    method.network.verify().require()
    logits = method.logits(new.train.batch(torch.arange(256, device="cuda"))[0], "a")
    return method.network, float((logits.argmax(1) == new.train.labels).double().mean())


class Twice(nn.Module):
    """A convolution that is used twice, and sums without a normalisation before them."""

    def __init__(self):
        super().__init__()
        self.stem, self.again = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            x = torch.relu(self.again(x) + x)
        return self.head(x.mean((2, 3)))


class ConvolutionAsHead(nn.Module):
    """A shared head with more outputs than the task has classes, and a convolution."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 20, 3, padding=1, bias=False), nn.Conv2d(20, 5, 1, bias=False)

    def forward(self, x):
        return self.head(torch.relu(self.body(x))).mean((2, 3))


@pytest.mark.parametrize("way", WAYS)
def test_a_convolutional_network_learns_with_every_way_to_compute(way):
    assert learned_pictures(engine(way))[1] > 0.9


@pytest.mark.parametrize("way", WAYS)
def test_two_runs_of_a_convolutional_network_agree_bit_for_bit(way):
    one, two = (learned_pictures(engine(way))[0] for _ in range(2))
    assert digests(one) == digests(two)


def assert_captured_right(way, module=None):
    """Captured, the gradients of weights are computed on a second stream: no bit may depend on it."""
    graph = learned_pictures(engine(way), copy.deepcopy(module))[0]
    plain = learned_pictures(engine(way, captured=False), copy.deepcopy(module))[0]
    assert digests(graph) == digests(plain)


@pytest.mark.parametrize("way", WAYS)
def test_captured_steps_of_a_convolutional_network_give_what_single_steps_give(way):
    assert_captured_right(way)


@pytest.mark.parametrize("way", KERNELS)
def test_a_convolution_that_is_used_twice_is_captured_right(way):
    assert_captured_right(way, Twice())


@pytest.mark.parametrize("way", KERNELS)
def test_a_convolution_of_which_a_task_uses_a_part_is_captured_right(way):
    assert_captured_right(way, ConvolutionAsHead())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_plain_accuracy(way):
    plain = learned_pictures(Engine())[1]
    assert abs(learned_pictures(engine(way))[1] - plain) < 0.05


NETWORKS = {"mlp": {}, "convolutions": {"network": "resnet18", "width": 8.0}}


def test_memory_of_a_run_on_the_gpu_grows_by_the_masks_bits_alone(tmp_path):
    held = []

    class Scales(Listener):
        def task_ended(self, name, accuracies):
            gc.collect()
            held.append(torch.cuda.memory_allocated())

    config = resolve("split-digits", "exssnet", 0, mask_epochs=1, weight_epochs=1)
    bits = run_all([config], tmp_path, [Scales()], 1000.0)[0]["storage"]["mask_bits"]
    assert (held[4] - held[2]) / 2 < bits / 8 / 5 + 4096


def short_runs(network, methods=("exssnet+kkt", "ssnet"), seeds=(0, 1, 2, 3), **changes):
    changes = {"tasks": 3, "mask_epochs": 3, "weight_epochs": 3} | NETWORKS[network] | changes
    return [resolve("split-digits", name, seed, **changes) for name in methods for seed in seeds]


@pytest.mark.parametrize("network", NETWORKS)
def test_runs_together_leave_the_records_of_runs_alone(network, tmp_path):
    configs = short_runs(network)  # more captures than there are streams
    quiet = [Listener() for _ in configs]
    alone = run_all(configs, tmp_path / "alone", quiet, 1000.0, together=1)
    together = run_all(configs, tmp_path / "together", quiet, 1000.0, together=8)
    for one, other in zip(alone, together, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_when_one_of_the_runs_together_fails_the_others_can_go_on_later(tmp_path):
    good, bad = short_runs("mlp", ["exssnet"]), short_runs("mlp", ["ssnet"], [0], lr=1e38)
    with pytest.raises(InputError, match="lower the learning rate"):
        run_all([*good, *bad], tmp_path / "cut", [Listener()] * 5, 0.0, together=5)
    alone = run_all(good, tmp_path / "alone", [Listener()] * 4, 1000.0)
    resumed = run_all(good, tmp_path / "cut", [Listener()] * 4, 0.0, together=4)
    for one, other in zip(alone, resumed, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_run_on_the_gpu_resumes_to_the_same_record(network, tmp_path, monkeypatch):
    config = short_runs(network, ["exssnet+kkt"], [0])[0]
    whole = run_all([config], tmp_path / "whole", [Listener()], 1000.0)[0]
    with cut_after(monkeypatch, 8):
        run_all([config], tmp_path / "cut", [Listener()], 0.0)
    resumed = run_all([config], tmp_path / "cut", [Listener()], 0.0)[0]
    assert {**whole, "seconds": 0} == {**resumed, "seconds": 0}


@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_masks_at_the_end_are_those_of_the_reference(density, ties):
    draw = torch.Generator().manual_seed(0)
    layout = MaskedNetwork(nn.Sequential(nn.Linear(90, 70), nn.ReLU(), nn.Linear(70, 11)), density).layout
    scores = torch.randn(layout.size, generator=draw)
    scores = scores.round(decimals=1) if ties else scores
    wanted = torch.cat([reference.mask(piece, density) for piece in layout.slices(scores)])
    assert torch.equal(select(scores.cuda(), layout, keep_counts(layout, density)).cpu(), wanted)


@pytest.mark.parametrize("ties", [False, True])
def test_scores_that_start_from_a_mask_are_the_same_as_on_a_cpu(ties):
    layout = MaskedNetwork(build("resnet18", (3, 32, 32), 20), 0.1, 0).layout
    draw = torch.Generator().manual_seed(0)
    fresh = torch.randn(layout.size, generator=draw)
    if ties:
        fresh = (8 * fresh).round()
    mask = torch.rand(layout.size, generator=draw) < 0.1
    found = scores_from_mask(fresh.cuda(), mask.cuda(), layout)
    assert torch.equal(found.cpu(), scores_from_mask(fresh, mask, layout))


def test_while_a_run_computes_fp32_is_fp32():
    (config,) = short_runs("mlp", ["exssnet"], [0])
    torch.set_float32_matmul_precision("high")
    with computing(config):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")


def test_a_second_task_compiles_nothing(tmp_path):
    graphs = []

    class Counts(Listener):
        def task_ended(self, name, accuracies):
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    config = short_runs("convolutions", ["exssnet+kkt"], [7], tasks=5, batch_size=61)  # tasks of two classes each
    run_all(config, tmp_path, [Counts()], 1000.0)
    assert graphs[0] > 0
    assert len(set(graphs)) == 1


def test_what_is_compiled_again_gives_the_same_bits(tmp_path):
    records = []
    for place in ("one", "two"):
        caches = {name: str(tmp_path / place / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        run = "run split-digits --network resnet18 --width 8 --tasks 2 --mask-epochs 2 --weight-epochs 2 --json --out"
        command = [sys.executable, "-m", "exssnet", *run.split(), str(tmp_path / place)]
        done = subprocess.run(command, env=os.environ | caches, check=True, stdout=subprocess.PIPE, text=True)
        records.append(json.loads(done.stdout)["zero_forgetting"]["digests"])
    assert records[0] == records[1]


def test_without_triton_a_run_learns_the_same_way(tmp_path, monkeypatch):
    with_kernels, *_ = run_all(short_runs("convolutions", ["exssnet"], [0]), tmp_path / "with", [Listener()], 1000.0)
    monkeypatch.setattr(exssnet.engine, "has_triton", lambda: False)
    config = short_runs("convolutions", ["exssnet"], [0])
    assert config[0].compile == "off"
    without, *_ = run_all(config, tmp_path / "without", [Listener()], 1000.0)
    assert without["zero_forgetting"]["verified"]
    assert without["average_accuracy"] > with_kernels["average_accuracy"] - 5


def test_the_chunks_of_kkts_sample_give_the_features_of_the_whole(monkeypatch):
    monkeypatch.setitem(transfer.CHUNK, "cuda", 300)
    network = learned(engine("fp32, kernels"), mlp)
    x = torch.randn(640, 12, generator=torch.Generator().manual_seed(0)).cuda()
    for name in network.tasks:
        torch.testing.assert_close(transfer._features(network, x, name), network.features(x, name))


@pytest.mark.parametrize("training", [True, False])
def test_precompiling_leaves_everything_as_it_was(training, monkeypatch):
    from exssnet.engine.cuda import runner

    def called():
        network = MaskedNetwork(build("resnet18", (3, 24, 24), 3, width=13), 0.3).to("cuda")
        network.use(engine("bf16, kernels"))
        x = torch.rand(17 if training else 1700, 3, 24, 24, device="cuda", generator=draw)  # tiles depend on it
        weights, own = network.weights.clone().requires_grad_(training), network.start_private("a", 3)
        with torch.set_grad_enabled(training):
            out = network.run(network.runner.weights(weights), own, 3, x, training=training)
        if training:
            out.sum().backward()
        return [out, weights.grad if training else weights, *own.values(), torch.cuda.get_rng_state()]

    draw = torch.Generator("cuda").manual_seed(0)
    torch.manual_seed(0)
    precompiled = called()
    monkeypatch.setattr(runner, "precompile", lambda device, function: None)
    draw.manual_seed(0)
    torch.manual_seed(0)
    assert all(map(torch.equal, precompiled, called()))


def test_captured_steps_draw_the_dropout_that_single_steps_draw():
    def with_dropout():
        return nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.5), nn.ReLU(), nn.Linear(40, 2))

    way = "fp32, kernels"
    assert digests(learned(engine(way), with_dropout)) == digests(learned(engine(way, captured=False), with_dropout))


def test_a_norm_layer_without_a_momentum_is_learned_step_by_step_which_is_said():
    def averaging():
        return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40, momentum=None), nn.ReLU(), nn.Linear(40, 2))

    with pytest.warns(UserWarning, match="cannot be captured"):
        network = learned(engine("fp32, kernels"), averaging)
    network.verify().require()


class LooksAtValues(nn.Module):
    """Can be neither captured nor compiled as one graph."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 30), nn.Linear(30, 2)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden if float(hidden.sum()) > -1e9 else -hidden)


def test_a_module_that_looks_at_values_falls_back_once_and_learns():
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    model = exssnet.Model(LooksAtValues(), density=0.3, device="cuda")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.learn("a", (x, (x[:, 0] > 0).long()), epochs=(5, 5))
    assert len([w for w in said if "cannot be captured" in str(w.message)]) == 1
    assert model.evaluate((x, (x[:, 0] > 0).long()), "a") > 80
    model.verify()


@pytest.mark.parametrize("way_in", ["Model", "run", "directory"])
def test_every_way_in_computes_with_the_engine_of_the_gpu(way_in, tmp_path):
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    data = x, (x[:, 0] > 0).long()
    if way_in == "Model":
        model = exssnet.Model(mlp(), density=0.3, device="cuda")
    elif way_in == "directory":
        exssnet.Model.create(tmp_path / "model", "mlp", (12,)).learn("a", data, epochs=(2, 2))
        model = exssnet.Model.open(tmp_path / "model", device="cuda").model
    else:
        (config,) = short_runs("mlp", ["exssnet"], [0])
        from exssnet.experiments.prepare import prepare

        assert prepare(config)[1].engine.name == "cuda"
        return
    assert model.network.engine.name == choose("cuda").name == "cuda"
    if way_in == "Model":
        model.learn("a", data, epochs=(2, 2))
    model.verify()
