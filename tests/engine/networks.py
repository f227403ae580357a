"""Networks with convolutions of every kind, and one step of each phase on them."""

import torch
from torch import nn

from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork
from exssnet.methods.masks._subnetworks import WinningSubnetwork
from exssnet.models import build


def convolutions():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 10, 3, stride=2, groups=5), nn.ReLU(),
        nn.ConvTranspose2d(10, 6, 2), nn.Conv2d(6, 4, 1, bias=False), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip
    module(torch.zeros(2, 3, 12, 12))
    return module


def networks(kind):
    torch.manual_seed(0)
    return build("resnet18", (3, 12, 12), 4, width=5) if kind == "resnet" else convolutions()


def one_step(kind, phase, engine, network=None):
    """Logits, the gradients of all that is learned and the statistics; of a given network the subnetwork."""
    x = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    given, network = network, network or MaskedNetwork(networks(kind), density=0.3, seed=0)
    network.use(engine)
    subnetwork = ScoredSubnetwork(network, "a", 3)
    if phase == "weights":
        subnetwork = WeightSubnetwork(subnetwork, torch.ones_like(network.bank.used))
    elif phase == "both":
        subnetwork = WinningSubnetwork(network, "a", 3, subnetwork.scores.detach())
    if given is not None:
        return subnetwork
    logits = subnetwork.logits(x, training=True)
    logits.square().sum().backward()
    statistics = torch.cat([b.double().view(-1) for b in subnetwork.buffers().values()])
    return [logits.detach(), *(p.grad for p in subnetwork.parameters()), statistics]
