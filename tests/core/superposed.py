"""Networks with tasks by chance, and the entropy of their superpositions by its definition."""

import torch
from tests.core.networks import Transformer, mlp
from torch import Tensor, nn
from torch.func import functional_call

from exssnet.core.network import MaskedNetwork


def convolutional(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 1), nn.InstanceNorm2d(8, track_running_stats=True), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )  # fmt: skip


class Own(torch.autograd.Function):
    """A square that forward mode knows nothing of."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Squares(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 9), nn.Linear(9, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Own.apply(self.first(x)))


def rows(count, *shape):
    return 5 * torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def words(count):
    return torch.randint(0, 20, (count, 8), generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "mlp": (mlp, lambda n: rows(n, 12)),
    "convolutional": (convolutional, lambda n: rows(n, 2, 7, 7)),
    "transformer": (Transformer, words),
    "no forward mode": (Squares, lambda n: rows(n, 12) / 5),
}
ROWS = 7
OPTIONS = {"shared": {}, "private": {"head": "task", "private": ("norm", "bias"), "init": "keep"}}


def drawn(module: nn.Module, classes: tuple[int, ...], **options) -> MaskedNetwork:
    """Tasks with masks and private tensors by chance, in double precision."""
    network = MaskedNetwork(module.double(), density=0.4, seed=0, **options)
    draw = torch.Generator().manual_seed(3)
    for number, count in enumerate(classes):
        own = {
            name: tensor.detach() + torch.rand(tensor.shape, generator=draw) if tensor.is_floating_point() else tensor
            for name, tensor in network.start_private(str(number), count).items()
        }
        mask, nothing = torch.rand(network.layout.size, generator=draw) < 0.4, torch.empty(0, dtype=torch.int64)
        network.commit(str(number), count, mask, nothing, network.weights[nothing], own)
    return network


def entropy_at(network: MaskedNetwork, module: nn.Module, x: Tensor, alphas: dict[str, float]) -> Tensor:
    """H of each row under Σ α_i · (the tensors of task i), by the plain module in evaluation mode."""
    largest = max(learned.classes for learned in network.tasks.values())
    superposed = network.layout.names.union(*(learned.private for learned in network.tasks.values()))
    total = network.frozen | network.buffers
    total |= {name: torch.zeros(()) for name in superposed if not name.endswith("num_batches_tracked")}
    for name, alpha in alphas.items():
        learned = network.task(name)
        tensors = network.buffers | network.effective(name) | learned.private
        for head in (f"{network.partition.head}.weight", f"{network.partition.head}.bias"):
            if head in tensors:
                own = tensors[head][: learned.classes]
                tensors[head] = torch.stack([*own, *[own.mean(0)] * (largest - len(own))])
        for key in superposed & total.keys():
            total[key] = total[key] + alpha * tensors[key]
    with torch.no_grad():
        log_p = functional_call(module.eval(), total, (x,)).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def slopes(network, module, x, names) -> Tensor:
    """−∂H/∂α of each row and task, one at a time, by differences of H itself."""
    step, columns = 1e-5, []
    for name in names:
        sides = []
        for sign in (1, -1):
            alphas = {other: 1 / len(names) + sign * step * (other == name) for other in names}
            sides.append(torch.cat([entropy_at(network, module, row, alphas) for row in x.split(1)]))
        columns.append((sides[1] - sides[0]) / (2 * step))
    return torch.stack(columns, 1)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def case(kind, options, classes=(3, 3, 3, 3, 3)):
    torch.manual_seed(0)
    build_module, inputs = NETWORKS[kind]
    module = build_module(classes=max(classes))
    return drawn(module, classes, **OPTIONS[options]), module, inputs(ROWS)
