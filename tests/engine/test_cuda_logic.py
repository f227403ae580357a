"""What the engine of a GPU does, apart from the GPU: kernels in Triton's interpreter, and graphs that are played."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tests.core.networks import mlp, task
from tests.engine.networks import networks, one_step
from tests.parts import need
from torch import nn

from exssnet.core.engine import Engine, Loop
from exssnet.core.layout import Layer, Layout
from exssnet.core.network import MaskedNetwork
from exssnet.engine.cuda import capture
from exssnet.engine.cuda.capture import CapturedLoop
from exssnet.engine.cuda.engine import CudaEngine
from exssnet.engine.cuda.memory_format import PaddedFormat
from exssnet.engine.cuda.runner import Options
from exssnet.methods import parse
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.train import Trainer, TrainSettings

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="plays a GPU: not for a machine with a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of NaN and overflow in the interpreter
]


def interpreted():
    need("triton", "the kernels need Triton: pip install triton")
    return CudaEngine(Options(None, kernels=True))


PADDED = CudaEngine(Options(None, kernels=False))


@pytest.mark.parametrize("kind", ["resnet", "mixed"])
@pytest.mark.parametrize("phase", ["mask", "weights", "both"])
def test_a_step_with_padded_channels_gives_what_the_plain_one_gives(kind, phase):
    for plain, ours in zip(one_step(kind, phase, Engine()), one_step(kind, phase, PADDED), strict=True):
        assert torch.allclose(plain, ours, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["mask", "weights", "both"])
def test_a_step_with_our_kernels_gives_what_the_plain_one_gives(phase):
    for plain, ours in zip(one_step("mixed", phase, Engine()), one_step("mixed", phase, interpreted()), strict=True):
        assert torch.allclose(plain, ours, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def test_low_precision_ends_at_the_logits():
    network = MaskedNetwork(nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 4)), density=0.3)
    network.use(CudaEngine(Options(torch.bfloat16, kernels=False)))
    weights = network.runner.weights(network.weights)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    own = {name: tensor.bfloat16() for name, tensor in network.start_private("a", 4).items()}
    frozen = {name: tensor.bfloat16() for name, tensor in network.frozen.items()}
    logits = network.runner.call({**frozen, **own, **weights}, torch.randn(4, 12).bfloat16())
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_every_weight_has_one_position_and_the_rest_is_zero(multiple):
    network = MaskedNetwork(networks("mixed"), density=0.3)
    padded = PaddedFormat(network.layout, torch.device("cpu"), multiple=multiple)
    assert len(set(padded.positions.tolist())) == network.layout.size
    vector = torch.arange(1.0, network.layout.size + 1)
    found = padded.padded(vector)
    assert len(found) == padded.size >= network.layout.size
    assert float(found.sum()) == pytest.approx(float(vector.sum()))
    plain, tensors = network.layout.tensors(vector), padded.tensors(found)
    for layer in network.layout.layers:
        cut = tensors[layer.name][tuple(slice(size) for size in layer.shape)]
        assert torch.equal(cut, plain[layer.name])
        if layer.convolution:
            assert tensors[layer.name].is_contiguous(memory_format=torch.channels_last)
            assert tensors[layer.name].shape[0] % multiple == 0


def test_convolutions_whose_channels_our_kernels_do_are_not_padded():
    layout = Layout((Layer("a", (5, 3, 3, 3), 27, 0, True), Layer("b", (5, 3, 3, 3), 27, 135, True)))
    padded = PaddedFormat(layout, torch.device("cpu"), narrow={"a"})
    assert [tuple(t.shape) for t in padded.tensors(padded.padded(torch.ones(270))).values()] == [
        (5, 3, 3, 3), (8, 8, 3, 3),
    ]  # fmt: skip


class Marked(nn.Module):
    """Computes otherwise with another attribute."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor, self.body, self.head = factor, nn.Linear(12, 9), nn.Linear(9, 2)

    def forward(self, x):
        return self.head(self.factor * self.body(x).relu())


def variant_of(engine, module):
    network = MaskedNetwork(module)
    network.use(engine)
    return network.runner.variant


def test_networks_of_one_structure_share_what_is_compiled_and_others_do_not():
    engine, other = CudaEngine(Options(None, False)), CudaEngine(Options(None, False))
    one = variant_of(engine, Marked())
    assert variant_of(engine, Marked()) is one
    assert variant_of(engine, Marked(3.0)) is not one
    assert variant_of(other, Marked()) is not one
    hooked = Marked()
    hooked.register_forward_hook(lambda *_: None)
    assert variant_of(engine, hooked) is not one
    unknown = Marked()
    unknown.way = lambda x: x  # nobody knows what it does
    assert variant_of(engine, unknown) is not variant_of(engine, unknown)


# --- capture -------------------------------------------------------------------------------------------------


class Played:
    """A graph: what is captured runs again at every replay."""

    def __init__(self):
        self.step = None

    def register_generator_state(self, generator): ...

    def replay(self):
        self.step()


class Event:
    def __init__(self, blocking=False): ...

    def record(self): ...

    def synchronize(self): ...


class GpuPlayed(Engine):
    """The plain way with captured steps; `fails`: what a capture raises."""

    def __init__(self, monkeypatch, fails=None):
        self.captured = []

        @contextmanager
        def captured(graph, stream):
            if fails is not None:
                raise fails
            yield
            size = int(self.loop_.asked)
            self.captured.append(size)
            graph.step = lambda: next_of(self.loop_, size)

        next_of = CapturedLoop._next

        def asked(loop, size):
            loop.asked = size
            next_of(loop, size)

        monkeypatch.setattr(CapturedLoop, "_next", asked)
        monkeypatch.setattr(capture.streams, "main_stream", lambda device: nullcontext())
        monkeypatch.setattr(capture.streams, "on_stream", lambda stream: nullcontext())
        monkeypatch.setattr(capture.streams, "capture", captured)
        monkeypatch.setattr(capture.streams, "begin", lambda: None)
        monkeypatch.setattr(capture, "precompile", lambda device, function: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Played)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.random, "fork_rng", forked)

    def loop(self, step):
        if not step.capturable:
            return Loop(step)
        self.loop_ = CapturedLoop(step, torch.device("cpu"), step.examples, set())
        return self.loop_


real_fork = torch.random.fork_rng


def forked(devices=(), **options):
    return real_fork(devices=[])


SETTINGS = {"exssnet+kkt": MaskSettings(density=0.2, mask_epochs=3, weight_epochs=2, kkt=True)}


def learned(engine, number=2, optimizer="adam"):
    torch.manual_seed(0)
    method = parse("exssnet+kkt")[0](mlp(), SETTINGS["exssnet+kkt"], 0)
    method.use(engine)
    for index in range(number):
        Trainer(method, 0, TrainSettings(37, optimizer)).learn(task(index))
    return method.network


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adamw"])
def test_captured_steps_give_what_single_steps_give(optimizer, monkeypatch):
    plain = learned(Engine(), optimizer=optimizer)
    played = GpuPlayed(monkeypatch)
    found = learned(played, optimizer=optimizer)
    assert len(played.captured) == 8  # two sizes of batches, in two phases of two tasks
    assert {n: t.digests for n, t in found.tasks.items()} == {n: t.digests for n, t in plain.tasks.items()}


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so_once(monkeypatch):
    plain = learned(Engine(), number=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        played = GpuPlayed(monkeypatch, RuntimeError("operation not permitted when stream is capturing\nmore"))
        found = learned(played, number=1)
    lines = [str(warning.message) for warning in said if "captured" in str(warning.message)]
    assert lines == [
        "the step of ExSSNeT, phase mask cannot be captured (operation not permitted when stream is capturing): "
        "it runs eagerly"
    ]
    for name in plain.tasks:
        assert found.tasks[name].digests == plain.tasks[name].digests


def test_a_full_gpu_is_not_taken_for_a_step_that_cannot_be_captured(monkeypatch):
    played = GpuPlayed(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        learned(played, number=1)


def test_an_optimizer_of_the_users_own_is_not_captured(monkeypatch):
    played = GpuPlayed(monkeypatch)
    learned(played, number=1, optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr))
    assert played.captured == []
