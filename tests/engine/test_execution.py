"""Other ways to compute give the same network."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork
from exssnet.engine.execution import PLAIN, Execution
from exssnet.engine.memory_format import Arrangement
from exssnet.errors import InputError
from exssnet.models import build

WAYS = {
    "channels last": Execution(channels_last=True),
    "filled channels": Execution(channels_last=True, channel_multiple=8),
    "narrow, others filled": Execution(channels_last=True, channel_multiple=8, narrow=16),
}


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 10, 3, stride=2, groups=5), nn.ReLU(),
        nn.ConvTranspose2d(10, 6, 2), nn.Conv2d(6, 4, 1, bias=False), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip


def networks(kind):
    torch.manual_seed(0)
    if kind == "resnet":
        return build("resnet18", (3, 12, 12), 4, width=5)
    module = convolutions()
    module(torch.zeros(2, 3, 12, 12))
    return module


@pytest.mark.parametrize("kind", ["resnet", "mixed"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["mask", "weights"])
def test_a_step_gives_the_plain_logits_gradients_and_statistics(kind, way, phase):
    module = networks(kind)
    x = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, execution in (("plain", PLAIN), ("other", WAYS[way])):
        network = MaskedNetwork(module, density=0.3, seed=0)
        network.execute(execution)
        subnetwork = ScoredSubnetwork(network, "a", 3)
        if phase == "weights":
            subnetwork = WeightSubnetwork(subnetwork, torch.ones_like(network.bank.used))
        logits = subnetwork.logits(x, training=True)
        logits.square().sum().backward()
        (gradient,) = [p.grad for p in subnetwork.parameters()]
        found[name] = (
            logits.detach(),
            gradient,
            torch.cat([b.double().view(-1) for b in subnetwork.buffers().values()]),
        )
        if phase == "weights":
            subnetwork.commit()
            baked = network.bake("a")
            with torch.no_grad():
                assert torch.allclose(baked(x), network.logits(x, "a"), atol=1e-4)
                assert {type(p).__name__ for p in baked.modules()} == {type(p).__name__ for p in module.modules()}
    for plain, other in zip(*found.values(), strict=True):
        assert torch.allclose(plain, other, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_every_weight_has_one_place_and_the_rest_is_zero(multiple):
    network = MaskedNetwork(networks("mixed"), density=0.3)
    arrangement = Arrangement(network.layout, True, multiple, torch.device("cpu"))
    assert len(set(arrangement.places.tolist())) == network.layout.size
    vector = torch.arange(1.0, network.layout.size + 1)
    arranged = arrangement(vector)
    assert len(arranged) == arrangement.size >= network.layout.size
    assert float(arranged.sum()) == pytest.approx(float(vector.sum()))
    plain, tensors = network.layout.tensors(vector), arrangement.tensors(arranged)
    for layer in network.layout.layers:
        cut = tensors[layer.name][tuple(slice(size) for size in layer.shape)]
        assert torch.equal(cut, plain[layer.name])
        if layer.convolution:
            assert tensors[layer.name].is_contiguous(memory_format=torch.channels_last)
            assert tensors[layer.name].shape[0] % multiple == 0


def test_a_low_precision_ends_at_the_logits():
    network = MaskedNetwork(networks("resnet"), density=0.3)
    network.execute(Execution(torch.bfloat16))
    logits = ScoredSubnetwork(network, "a", 4).logits(torch.randn(4, 3, 12, 12), training=True)
    assert logits.dtype == torch.float32


def test_a_subnetwork_does_not_run_on_after_the_network_computes_another_way():
    network = MaskedNetwork(networks("resnet"), density=0.3)
    subnetwork = ScoredSubnetwork(network, "a", 4)
    network.execute(WAYS["channels last"])
    with pytest.raises(InputError, match="compute another way"):
        subnetwork.logits(torch.randn(4, 3, 12, 12), training=True)


class Own(nn.Conv2d):
    pass


@pytest.mark.parametrize("kind", ["subclass", "tied", "private head"])
def test_convolutions_that_cannot_be_filled_are_left_as_they_are(kind):
    torch.manual_seed(0)
    if kind == "subclass":
        module = nn.Sequential(Own(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(500, 3))
    elif kind == "tied":
        module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ConvTranspose2d(5, 3, 3), nn.Flatten(), nn.Linear(432, 3))
        module[1].weight = module[0].weight
    else:
        module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(4, 3, 12, 12)
    found = []
    for execution in (PLAIN, WAYS["filled channels"]):
        network = MaskedNetwork(module, density=0.5, head="task" if kind == "private head" else "shared")
        network.execute(execution)
        found.append(ScoredSubnetwork(network, "a", 3).logits(x, training=False))
    assert torch.allclose(*found, atol=1e-5)


def test_networks_of_one_structure_share_their_form_and_nothing_else():
    networks_ = [MaskedNetwork(build("resnet18", (3, 12, 12), 4, width=5), density=0.3, seed=seed) for seed in (0, 1)]
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    way = Execution(channels_last=True)
    found = []
    for structure in ("", "a test's resnet18"):
        for network in networks_:
            network.execute(replace(way, structure=structure))
        forms = {id(network.runner._form) for network in networks_}
        assert len(forms) == (1 if structure else 2)
        found.append([ScoredSubnetwork(network, "a", 4).logits(x, training=True) for network in networks_])
    for alone, shared in zip(*found, strict=True):
        assert torch.equal(alone, shared)
    assert not torch.equal(*found[0])


@pytest.mark.parametrize("way", WAYS)
def test_no_memory_is_written_that_is_not_ours(way):
    """oneDNN does so with few channels in channels-last order; a process of its own, since it would not survive."""
    steps = f"""
import torch
from tests.engine.test_execution import WAYS
from exssnet.core.network import MaskedNetwork
from exssnet.models import build
network = MaskedNetwork(build("resnet18", (3, 24, 24), 3, width=4))
network.execute(WAYS[{way!r}])
for _ in range(5):
    weights = network.weights.clone().requires_grad_()
    layers, own = network.layers(network.arrangement(weights)), network.start_private("a", 3)
    network.run(layers, own, 3, torch.rand(5, 3, 24, 24), training=True).sum().backward()
"""
    subprocess.run([sys.executable, "-c", steps], check=True)
