"""The GPU's fast paths against the reference and the plain path. Needs a CUDA device."""

import gc
from dataclasses import replace

import pytest
import torch
from tests.core.networks import mlp, task
from tests.stopping import cut_after
from torch import nn

from exssnet.core import reference
from exssnet.core.convolution import convolve
from exssnet.core.execution import CUDA, Execution
from exssnet.core.layout import Layer, Layout
from exssnet.core.loss import count, cross_entropy
from exssnet.data import HorizontalFlip, Normalize, Pipeline, RandomCrop, Task, TensorData
from exssnet.data.tensors import Shared
from exssnet.experiments.config import resolve
from exssnet.experiments.together import run_all
from exssnet.methods import parse
from exssnet.methods.supsup import MaskSettings
from exssnet.models import build
from exssnet.train import Listener, Trainer, TrainSettings
from exssnet.train import loop as loop_module

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler warns of its own
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


if torch.cuda.is_available():
    from exssnet.core.selection_triton import TritonSelector
    from exssnet.data.batch_triton import FusedBatch, fused
    from exssnet.train.adam_triton import LONG, LongAdam


WAYS = {
    "plain": Execution(),
    "bf16, filled": Execution(torch.bfloat16, channels_last=True, channel_multiple=8),
    "bf16, narrow": Execution(torch.bfloat16, channels_last=True, narrow=192),
    "fp32, narrow": Execution(channels_last=True, narrow=192),
    "compiled": replace(CUDA, compiled_batch=60),
}


def layout_of(sizes):
    layers, start = [], 0
    for number, size in enumerate(sizes):
        layers.append(Layer(str(number), (size,), 1, start))
        start += size
    return Layout(tuple(layers))


@pytest.mark.parametrize("levels", [0, 1, 3, 1000])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9, 1.0])
def test_selection_on_the_gpu_equals_the_reference_also_with_ties(levels, density):
    sizes = [540, 3600, 230_400, 2048, 4097, 1000, 100_003]
    layout = layout_of(sizes)
    keep = tuple(reference.keep(size, density) for size in sizes)
    places = torch.randperm(layout.size, generator=torch.Generator().manual_seed(1)).int().cuda()
    selector = TritonSelector(layout, keep, places, layout.size)
    for seed in range(3):  # the counters must be clean again after each selection
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randn(layout.size, generator=draw)
        if levels:
            scores = torch.randint(-levels, levels + 1, (layout.size,), generator=draw) / levels
        weights = torch.randn(layout.size, generator=draw)
        mask = torch.cat([reference.mask(piece, density) for piece in layout.slices(scores)])
        wanted = torch.where(mask, weights, torch.zeros(()))
        variable = scores.cuda().requires_grad_()
        found = selector.masked_weights(variable, weights.cuda(), torch.float32)
        assert torch.equal(found[places.long()].cpu(), wanted)
        inflow = torch.randn(layout.size, generator=draw)
        found.backward(inflow.cuda())
        expected = reference.score_gradient(scores, weights, inflow[places.long().cpu()])
        assert torch.allclose(variable.grad.cpu(), expected, rtol=1e-6, atol=0)


def test_selection_follows_scores_that_move_step_by_step():
    """Most steps are known from the last threshold; ties and jumps between them must not confuse it."""
    layout = layout_of([540, 230_400, 30_000])
    keep = tuple(reference.keep(layer.size, 0.1) for layer in layout.layers)
    places = torch.arange(layout.size, dtype=torch.int32, device="cuda")
    selector = TritonSelector(layout, keep, places, layout.size)
    draw = torch.Generator().manual_seed(0)
    scores, weights, left = torch.rand(layout.size, generator=draw) - 0.5, torch.ones(layout.size), []
    for step in range(12):
        scores += 0.001 * torch.randn(layout.size, generator=draw)
        if step == 8:
            scores *= 3  # out of every window
        if step >= 10:
            scores = (100 * scores).round() / 100  # many equals
        mask = torch.cat([reference.mask(piece, 0.1) for piece in layout.slices(scores)])
        found = selector.masked_weights(scores.cuda(), weights.cuda(), torch.float32)
        assert torch.equal(found.bool().cpu(), mask)
        left.append(selector.left.tolist())
    assert left[0] == left[8] == [2, 2, 2]
    assert left[5] == [0, 0, 0]
    assert left[11][1:] == [1, 1]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 7, 5)])
def test_a_batch_in_one_launch_equals_the_plain_transforms_bit_for_bit(shape):
    images = torch.randint(0, 256, (50, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).cuda()
    scale = Normalize.channels(1 / 255, (0.5, 0.4, 0.3)[: shape[0]], (0.2, 0.3, 0.25)[: shape[0]]).to("cuda")
    rows = torch.randint(0, 50, (13,), device="cuda")
    for steps in [(scale,), (HorizontalFlip(), scale), (RandomCrop(4), HorizontalFlip(), scale)]:
        fast, plain = fused(images, Pipeline(steps)), Pipeline(steps)
        assert isinstance(fast, FusedBatch)
        assert torch.equal(fast(rows, None), plain(images[rows], None))
        one, two = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
        assert torch.equal(fast(rows, one), plain(images[rows], two))
    assert fused(images, Pipeline((RandomCrop(4), scale))) is None


@pytest.mark.parametrize(("rows", "classes"), [(64, 20), (1, 2), (300, 200), (5, 1000), (16, 5000)])
def test_the_loss_and_its_count_equal_torchs(rows, classes):
    draw = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(rows, classes, generator=draw)).cuda().requires_grad_()
    labels = torch.randint(0, classes, (rows,), generator=draw).cuda()
    loss, total = cross_entropy(logits, labels), torch.tensor([1.0, 2.0], device="cuda")
    (2 * loss).backward()
    found, logits.grad = logits.grad, None
    expected = nn.functional.cross_entropy(logits, labels)
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-7)
    count(total, loss, logits, labels)
    right = int((logits.argmax(1) == labels).sum())
    assert total[1] == 2 + right
    assert float(total[0]) == pytest.approx(1 + expected.item() * rows, rel=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_for_long_vectors_equals_torchs(decay):
    sizes, draw = (LONG, 3 * LONG + 7, 5), torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=draw).cuda() for size in sizes]
    one, two = ([piece.clone().requires_grad_() for piece in start] for _ in range(2))
    rate = torch.tensor(0.01, device="cuda")
    ours = LongAdam(one, rate, weight_decay=decay)
    theirs = torch.optim.AdamW(two, rate.clone(), weight_decay=decay, fused=True, capturable=True)
    for step in range(30):
        for p, q in zip(one, two, strict=True):
            p.grad = (10 ** (-step / 5) * torch.randn(len(p), generator=draw)).cuda()
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    assert ours.state[one[0]]["step"] == 30


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "stride"),
    [(3, 20, 32, 3, 1), (20, 20, 32, 3, 1), (20, 40, 32, 3, 2), (20, 40, 33, 1, 2), (80, 160, 8, 3, 2),
     (160, 160, 4, 3, 1), (5, 7, 9, 5, 1)],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.005), (torch.float32, 2e-6)])
def test_convolutions_of_few_channels_equal_torchs(inputs, outputs, size, kernel, stride, dtype, tolerance):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, inputs, size, size, generator=draw).cuda().to(dtype).requires_grad_()
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=draw).cuda().to(dtype).requires_grad_()
    out = convolve(x, weight, stride, kernel // 2)
    inflow = torch.randn(out.shape, generator=draw).cuda().to(dtype)
    out.backward(inflow)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (x, weight)]
    expected = nn.functional.conv2d(*exact, stride=stride, padding=kernel // 2)
    expected.backward(inflow.double().cpu())
    for found, wanted in ((out, expected), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert (found.double().cpu() - wanted).abs().max() <= tolerance * wanted.abs().max()
    again = convolve(x, weight, stride, kernel // 2)
    assert torch.equal(again, out)


def learned(execution, module, number=2, batch_size=32, **sizes):
    torch.manual_seed(0)
    method = parse("exssnet+kkt")[0](module(), MaskSettings(density=0.2, mask_epochs=3, weight_epochs=3, kkt=True), 0)
    method.to("cuda")
    method.network.execute(execution)
    trainer = Trainer(method, 0, TrainSettings(batch_size))
    for index in range(number):
        new = task(index, **sizes)

        trainer.learn(replace(new, train=new.train.to("cuda"), test=new.test.to("cuda")))
    return method.network


def test_captured_steps_give_what_single_steps_give_bit_for_bit(monkeypatch):
    graph = learned(Execution(), mlp)
    monkeypatch.setattr(loop_module, "capturable", lambda *_: False)
    plain = learned(Execution(), mlp)
    for name in graph.tasks:
        assert graph.tasks[name].digests == plain.tasks[name].digests
    graph.verify().require()


def pictures():
    y = torch.arange(256) % 2
    x = (60 * torch.rand(256, 3, 16, 16, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    x += (100 * y[:, None, None, None]).to(torch.uint8)
    pipeline = Pipeline((RandomCrop(2), HorizontalFlip(), Normalize.unit()))
    data = TensorData(Shared(x), torch.arange(256), y, 2, pipeline).to("cuda")
    return Task(0, "a", (0, 1), data, data)


def learned_pictures(execution):
    new = pictures()
    settings = MaskSettings(density=0.3, mask_epochs=10, weight_epochs=10)
    method = parse("exssnet")[0](build("resnet18", (3, 16, 16), 2, width=12), settings, 0)
    method.to("cuda")
    method.execute(execution)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        Trainer(method, 0, TrainSettings(60)).learn(new)
    method.network.verify().require()
    logits = method.logits(new.train.batch(torch.arange(256, device="cuda"))[0], "a")
    return method.network, float((logits.argmax(1) == new.train.labels).double().mean())


@pytest.mark.parametrize("way", WAYS)
def test_a_convolutional_network_learns_with_every_execution(way):
    assert learned_pictures(WAYS[way])[1] > 0.9


@pytest.mark.parametrize("way", WAYS)
def test_two_runs_of_a_convolutional_network_agree_bit_for_bit(way):
    one, two = (learned_pictures(WAYS[way])[0] for _ in range(2))
    assert one.tasks["a"].digests == two.tasks["a"].digests


@pytest.mark.parametrize("way", ["bf16, filled", "bf16, narrow", "fp32, narrow", "compiled"])
def test_captured_steps_of_a_convolutional_network_give_what_single_steps_give(way, monkeypatch):
    """Captured, the gradients of weights are computed beside the main line: no bit may depend on it."""
    graph = learned_pictures(WAYS[way])[0]
    monkeypatch.setattr(loop_module, "capturable", lambda *_: False)
    plain = learned_pictures(WAYS[way])[0]
    assert graph.tasks["a"].digests == plain.tasks["a"].digests


def test_memory_on_the_gpu_grows_by_the_masks_bits_alone():
    method = parse("exssnet")[0](mlp(inputs=784, hidden=300), MaskSettings(mask_epochs=1, weight_epochs=1), 0)
    method.to("cuda")
    trainer, held = Trainer(method, 0, TrainSettings(32)), []
    for index in range(6):
        new = task(index, inputs=784)
        trainer.learn(replace(new, train=new.train.to("cuda"), test=new.test.to("cuda")))
        del new
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    each = method.network.layout.size // 8
    assert (held[5] - held[2]) / 3 < each + 4096


def test_runs_together_leave_the_records_of_runs_alone(tmp_path):
    configs = [
        resolve("split-digits", name, seed, tasks=3, mask_epochs=3, weight_epochs=3)
        for name in ("exssnet+kkt", "ssnet")
        for seed in (0, 1)
    ]
    quiet = [Listener() for _ in configs]
    alone = run_all(configs, tmp_path / "alone", quiet, 1000.0, together=1)
    together = run_all(configs, tmp_path / "together", quiet, 1000.0, together=4)
    for one, other in zip(alone, together, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_run_on_the_gpu_resumes_to_the_same_record(tmp_path, monkeypatch):
    config = resolve("split-digits", "exssnet+kkt", 0, tasks=3, mask_epochs=3, weight_epochs=3)
    whole = run_all([config], tmp_path / "whole", [Listener()], 1000.0)[0]
    with cut_after(monkeypatch, 8):
        run_all([config], tmp_path / "cut", [Listener()], 0.0)
    resumed = run_all([config], tmp_path / "cut", [Listener()], 0.0)[0]
    assert {**whole, "seconds": 0} == {**resumed, "seconds": 0}


def test_captured_steps_draw_the_dropout_that_single_steps_draw(monkeypatch):
    def with_dropout():
        return nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.5), nn.ReLU(), nn.Linear(40, 2))

    graph = learned(Execution(), with_dropout)
    monkeypatch.setattr(loop_module, "capturable", lambda *_: False)
    plain = learned(Execution(), with_dropout)
    for name in graph.tasks:
        assert graph.tasks[name].digests == plain.tasks[name].digests


def test_a_norm_layer_without_a_momentum_is_learned_step_by_step():
    def averaging():
        return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40, momentum=None), nn.ReLU(), nn.Linear(40, 2))

    learned(Execution(), averaging).verify().require()
