"""Routing against its definition on random networks, and on digits that nobody has labelled with a task."""

import itertools
import math

import pytest
import torch
from sklearn.datasets import load_digits
from tests.core.networks import Transformer, mlp
from torch import Tensor, nn
from torch.func import functional_call

from exssnet import InputError, Model
from exssnet.core import routing
from exssnet.core.execution import CPU
from exssnet.core.network import MaskedNetwork
from exssnet.core.routing import RULES, Superposition, route
from exssnet.models import build

# --- Against the definition ---------------------------------------------------------------------------------


def convolutional(classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 1),
        nn.InstanceNorm2d(8, track_running_stats=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


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
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def words(count):
    return torch.randint(0, 20, (count, 8), generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "mlp": (mlp, lambda n: rows(n, 12)),
    "convolutional": (convolutional, lambda n: rows(n, 2, 7, 7)),
    "transformer": (Transformer, words),
    "no forward mode": (Squares, lambda n: rows(n, 12)),
}
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
        mask = torch.rand(network.layout.size, generator=draw) < 0.4
        nothing = torch.empty(0, dtype=torch.int64)
        network.commit(str(number), count, mask, nothing, network.weights[nothing], own)
    return network


def entropy_at(network: MaskedNetwork, module: nn.Module, x: Tensor, alphas: dict[str, float]) -> Tensor:
    """H of each row under Σ α_i · (the tensors of task i), by the plain module in evaluation mode."""
    largest = max(network.task(name).classes for name in alphas)
    total: dict[str, Tensor] = {}
    for name, alpha in alphas.items():
        learned = network.task(name)
        tensors = network.frozen | network.buffers | network.effective(name) | learned.private
        for part in ("weight", "bias"):
            head = tensors.get(f"{network.partition.head}.{part}")
            if head is not None:
                head = head[: learned.classes]
                missing = [head.mean(0)] * (largest - len(head))
                tensors[f"{network.partition.head}.{part}"] = torch.stack([*head, *missing])
        for key, tensor in tensors.items():
            whole = not tensor.is_floating_point()
            total[key] = tensor if whole else total.get(key, 0) + alpha * tensor
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
    return drawn(module, classes, **OPTIONS[options]), module, inputs(7)


@pytest.mark.parametrize("classes", [(3, 3, 3, 3, 3), (3, 2, 5)], ids=["equal", "unequal"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_one_shot_scores_are_the_entropys_slopes_along_each_task(kind, options, classes):
    network, module, x = case(kind, options, classes)
    names = tuple(network.tasks)
    expected = slopes(network, module, x, names)
    found = route(network, x, "one-shot")
    same(found.scores, expected)
    assert found.tasks == names
    assert torch.equal(found.choice, expected.argmax(1))
    assert len(set(found.choice.tolist())) > 1
    same(route(network, x, "one-shot", chunk=3).scores, expected)

    of_batch = route(network, x, "one-shot", per="batch", chunk=3)
    same(of_batch.scores, expected.mean(0).expand(7, -1))
    assert of_batch.choice.tolist() == [int(expected.mean(0).argmax())] * 7


@pytest.mark.parametrize("kind", ["mlp", "convolutional", "transformer"])
def test_common_layers_have_forward_mode(kind, monkeypatch):
    network, _, x = case(kind, "private")
    monkeypatch.setattr(Superposition, "_row_by_row", lambda *_: pytest.fail("one row at a time"))
    route(network, x, "one-shot")


def halving(slopes_among, count) -> tuple[int, dict[int, float]]:
    """One case, by the definition: the task that is left, and the last score of each."""
    left, last = list(range(count)), {}
    for _ in range(math.ceil(math.log2(count))):
        last |= dict(zip(left, slopes_among(left), strict=True))
        best = sorted(left, key=last.__getitem__, reverse=True)
        left = sorted(best[: (len(left) + 1) // 2])
    return left[0], last


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("classes", [(3,) * 6, (3, 2, 5, 4, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", ["mlp", "convolutional"])
def test_binary_halves_the_candidates_of_each_case_for_itself(kind, classes, per):
    network, module, x = case(kind, "private", classes)
    names = list(network.tasks)
    found = route(network, x, "binary", per=per)
    left_at_last = set()
    for number, row in enumerate(x.split(1)):
        rows_of_case = row if per == "row" else x

        def among(left, rows_of_case=rows_of_case):
            largest = max(network.task(name).classes for name in names)
            # the output keeps its classes while the candidates get fewer: a task without a weight has its say there
            return slopes_with(network, module, rows_of_case, [names[i] for i in left], largest)

        choice, last = halving(among, len(names))
        assert int(found.choice[number]) == choice
        same(found.scores[number], torch.tensor([last[i] for i in range(len(names))], dtype=torch.float64))
        left_at_last.add(choice)
    assert per == "batch" or len(left_at_last) > 1
