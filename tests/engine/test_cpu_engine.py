"""The engine of a CPU gives what the plain one gives, up to rounding."""

import subprocess
import sys

import pytest
import torch
from tests.engine.networks import convolutions, networks, one_step
from torch import nn

from exssnet.core.engine import Engine
from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import ScoredSubnetwork
from exssnet.engine import choose
from exssnet.engine.cpu.engine import CpuEngine
from exssnet.errors import InputError


@pytest.mark.parametrize("kind", ["resnet", "mixed"])
@pytest.mark.parametrize("phase", ["mask", "weights", "both"])
def test_a_step_gives_the_plain_logits_gradients_and_statistics(kind, phase):
    for plain, ours in zip(one_step(kind, phase, Engine()), one_step(kind, phase, CpuEngine()), strict=True):
        assert torch.allclose(plain, ours, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def test_a_baked_module_is_of_the_users_classes():
    module = convolutions()
    network = MaskedNetwork(module, density=0.3)
    network.use(CpuEngine())
    one_step("mixed", "weights", CpuEngine(), network).commit()
    baked, x = network.bake("a"), torch.randn(6, 3, 12, 12)
    with torch.no_grad():
        assert torch.allclose(baked(x), network.logits(x, "a"), atol=1e-4)
    assert [type(part) for part in baked.modules()] == [type(part) for part in module.modules()]


def test_a_subnetwork_does_not_run_on_after_the_network_computes_another_way():
    network = MaskedNetwork(networks("resnet"), density=0.3)
    subnetwork = ScoredSubnetwork(network, "a", 4)
    network.use(CpuEngine())
    with pytest.raises(InputError, match="compute another way"):
        subnetwork.logits(torch.randn(4, 3, 12, 12), training=True)


class Own(nn.Conv2d):
    pass


def unusual(kind):
    torch.manual_seed(0)
    if kind == "subclass":
        return nn.Sequential(Own(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(500, 3))
    if kind == "tied":
        module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ConvTranspose2d(5, 3, 3), nn.Flatten(), nn.Linear(432, 3))
        module[1].weight = module[0].weight
        return module
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 1, stride=3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("kind", ["subclass", "tied", "private head"])
def test_unusual_convolutions_give_what_they_give(kind):
    x, found = torch.randn(4, 3, 12, 12), []
    for engine in (Engine(), CpuEngine()):
        network = MaskedNetwork(unusual(kind), density=0.5, head="task" if kind == "private head" else "shared")
        network.use(engine)
        found.append(ScoredSubnetwork(network, "a", 3).logits(x, training=False))
    assert torch.allclose(*found, atol=1e-5)


def test_no_memory_is_written_that_is_not_ours():
    """oneDNN does so with few channels in channels-last format; a process of its own, since it would not survive."""
    steps = """
import torch
from exssnet.core.network import MaskedNetwork
from exssnet.engine.cpu.engine import CpuEngine
from exssnet.models import build
network = MaskedNetwork(build("resnet18", (3, 24, 24), 3, width=4))
network.use(CpuEngine())
for _ in range(5):
    weights, own = network.weights.clone().requires_grad_(), network.start_private("a", 3)
    network.run(network.runner.weights(weights), own, 3, torch.rand(5, 3, 24, 24), training=True).sum().backward()
"""
    subprocess.run([sys.executable, "-c", steps], check=True)


def test_the_one_door_gives_each_device_its_engine_and_refuses_what_it_cannot_do():
    assert isinstance(choose("cpu"), CpuEngine)
    assert type(choose("meta")) is Engine
    with pytest.raises(InputError, match="precision bf16 is about ten times slower"):
        choose("cpu", precision="bf16")
    with pytest.raises(InputError, match="compile on needs a GPU"):
        choose("cpu", compile="on")
    with pytest.raises(InputError, match="precision is 'int8': choose one of auto, fp32, bf16"):
        choose("cpu", precision="int8")
