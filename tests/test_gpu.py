"""The GPU's fast paths against the reference and the plain path. Needs a CUDA device."""

import pytest
import torch
from tests.core.networks import mlp, task

from exssnet.core import reference
from exssnet.core.execution import Execution
from exssnet.core.layout import Layer, Layout
from exssnet.core.selection import triton_selector
from exssnet.methods import parse
from exssnet.methods.supsup import MaskSettings
from exssnet.models import build
from exssnet.train import Trainer, TrainSettings
from exssnet.train import loop as loop_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layout_of(sizes):
    layers, start = [], 0
    for number, size in enumerate(sizes):
        layers.append(Layer(str(number), (size,), 1, start))
        start += size
    return Layout(tuple(layers))


@pytest.mark.parametrize("levels", [0, 1, 3, 1000])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9, 1.0])
def test_the_radix_select_equals_the_reference_also_with_ties(levels, density):
    sizes = [540, 3600, 230_400, 2048, 4097, 1000, 100_003]
    layout = layout_of(sizes)
    keep = tuple(reference.keep(size, density) for size in sizes)
    places = torch.randperm(layout.size, generator=torch.Generator().manual_seed(1)).int().cuda()
    selector = triton_selector(layout, keep, places)
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


def learned(execution, kind, module, number=2, batch_size=32, **sizes):
    torch.manual_seed(0)
    method = parse("exssnet+kkt")[0](module(), MaskSettings(density=0.2, mask_epochs=3, weight_epochs=3, kkt=True), 0)
    method.to("cuda")
    method.network.execute(execution)
    trainer = Trainer(method, 0, TrainSettings(batch_size))
    for index in range(number):
        new = task(index, **sizes)
        from dataclasses import replace

        trainer.learn(replace(new, train=new.train.to("cuda"), test=new.test.to("cuda")))
    return method.network


def test_captured_steps_give_what_single_steps_give_bit_for_bit(monkeypatch):
    graph = learned(Execution(), "graph", mlp)
    monkeypatch.setattr(loop_module, "capturable", lambda *_: False)
    plain = learned(Execution(), "plain", mlp)
    for name in graph.tasks:
        assert graph.tasks[name].digests == plain.tasks[name].digests
    graph.verify().require()


def test_a_convolutional_network_learns_with_every_execution():
    from exssnet.data import Normalize, Pipeline, RandomCrop, Task, TensorData
    from exssnet.data.tensors import Shared

    y = torch.arange(256) % 2
    x = (60 * torch.rand(256, 3, 16, 16, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    x += (100 * y[:, None, None, None]).to(torch.uint8)
    pipeline = Pipeline((RandomCrop(2), Normalize.unit()))
    data = TensorData(Shared(x), torch.arange(256), y, 2, pipeline).to("cuda")
    new = Task(0, "a", (0, 1), data, data)
    for execution in (
        Execution(),
        Execution(torch.bfloat16, channels_last=True),
        Execution(torch.bfloat16, channels_last=True, compiled=True),
    ):
        settings = MaskSettings(density=0.3, mask_epochs=8, weight_epochs=8)
        method = parse("exssnet")[0](build("resnet18", (3, 16, 16), 2, width=8), settings, 0)
        method.to("cuda")
        method.network.execute(execution)
        Trainer(method, 0, TrainSettings(60)).learn(new)
        found = method.logits(data.batch(torch.arange(256, device="cuda"))[0], "a").argmax(1)
        assert float((found == data.labels).double().mean()) > 0.9, execution
        method.network.verify().require()
