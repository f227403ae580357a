"""The diagonal of the empirical Fisher information against a loop over single examples."""

import pytest
import torch
from tests.core.networks import Transformer, mlp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from exssnet.methods.regularize import _fisher
from exssnet.methods.regularize._fisher import fisher_diagonal
from exssnet.methods.shared.flat_network import FlatNetwork

CLASSES, EXAMPLES = 5, 7


def convolutional():
    """With norm statistics as after some training."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_(0, 0.5)
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))


class Branching(nn.Module):
    """Chooses a layer by a value of the example, so that each example leaves one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(6), nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.left(self.norm(row)) if row[0, 0] > 0 else self.right(self.norm(row)) for row in x.split(1)]
        return torch.cat(rows)


class Mixing(nn.Module):
    """Linear layers alone, but an example's answer depends on whether others are there: one at a time is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 9), nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x - x.mean(0) * (len(x) > 1)).relu())


def linear_layers():
    layers = [nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def tied():
    """One weight in two layers."""
    module = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, CLASSES))
    module[2].weight = module[0].weight
    return module


NETWORKS = {
    "linear layers": (linear_layers, lambda: torch.randn(EXAMPLES, 3, 4)),
    "tied": (tied, lambda: torch.randn(EXAMPLES, 12)),
    "mixing": (Mixing, lambda: torch.randn(EXAMPLES, 12)),
    "mlp": (lambda: mlp(CLASSES), lambda: torch.randn(EXAMPLES, 12)),
    "convolutional": (convolutional, lambda: torch.randn(EXAMPLES, 3, 8, 8)),
    "transformer": (lambda: Transformer(CLASSES), lambda: torch.randint(0, 20, (EXAMPLES, 8))),
    "branching": (Branching, lambda: torch.randn(EXAMPLES, 6)),
}


def example(name):
    """A module, inputs and labels among its last three outputs."""
    module, x = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, x = module().double(), x()
    return module, x.double() if x.is_floating_point() else x, torch.arange(EXAMPLES) % 3


def one_at_a_time(module, x, labels):
    """What autograd of the module itself finds in evaluation mode."""
    module.eval()
    total = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for row, label in zip(x, labels, strict=True):
        loss = cross_entropy(module(row[None])[:, 2:5], label[None])
        found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        for number, gradient in enumerate(found):
            total[number] += 0 if gradient is None else gradient**2
    return dict(zip([name for name, _ in module.named_parameters()], total, strict=True))


@pytest.mark.parametrize("held", [_fisher.HELD, 1], ids=["all at once", "one by one"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_diagonal_is_the_sum_of_single_examples_squared_gradients(name, held, monkeypatch):
    monkeypatch.setattr(_fisher, "HELD", held)
    module, x, labels = example(name)
    network = FlatNetwork(module)
    with torch.no_grad():
        found = network.layout.tensors(fisher_diagonal(network, x, labels, slice(2, 5)))
    for weight, expected in one_at_a_time(module, x, labels).items():
        torch.testing.assert_close(found[weight], expected, rtol=1e-9, atol=1e-12)
    assert any(value.any() for value in found.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_and_norm_statistics_stay_as_they_are(name):
    module, x, labels = example(name)
    network = FlatNetwork(module)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    fisher_diagonal(network, x, labels, slice(2, 5))
    assert network.weights.grad is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
