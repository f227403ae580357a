"""Modules that keep something outside of their parameters and buffers. Some answer by it, others do not."""

import logging
import random
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def between(part: nn.Module, inputs: int = 12, hidden: int = 20) -> nn.Module:
    """A network that passes what it computes through a part."""
    layers = {"one": nn.Linear(inputs, hidden), "part": part, "relu": nn.ReLU(), "two": nn.Linear(hidden, 2)}
    whole = nn.Sequential()
    for name, layer in layers.items():
        whole.add_module(name, layer)
    return whole


# --- they answer by it ---------------------------------------------------------------------------------------------


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3)


class Coin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.7 else 2 * x


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())  # noqa: NPY002


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.draw.random())


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Largest(nn.Module):
    """A number in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SimpleNamespace(largest=1.0, unit="mV")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.largest = max(self.seen.largest, float(x.detach().abs().max()))
        return x / self.seen.largest


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.last.append(float(x.detach().mean()))
        return x + sum(self.last)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums = {"x": 0.0, "count": 0}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sums["x"] += float(x.detach().sum())
            self.sums["count"] += len(x)
        return x + self.sums["x"] / max(self.sums["count"], 1)


class FirstBatch(nn.Module):
    """Centred on the first batch that it ever sees."""

    def __init__(self) -> None:
        super().__init__()
        self.centre: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        return x - self.centre


class WarmUp(nn.Module):
    """Does something else after many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls < 1000 else 2 * x


class CoolDown(nn.Module):
    """The same, counted down in something that is made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.left: SimpleNamespace | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.left is None:
            self.left = SimpleNamespace(calls=1000)
        self.left.calls -= 1
        return x if self.left.calls > 0 else 2 * x


class Annealed(nn.Module):
    """The same, counted in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return x / 2 if self.steps > 500 else x


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.odd = not self.odd
        return -x if self.odd else x


class HiddenNorm(nn.Module):
    """Its norm layer is in a list, which PyTorch does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(20, affine=False)]

    def forward(self, x: Tensor) -> Tensor:
        self.norms[0].train(self.training)
        return self.norms[0](x)


class OfGradients(nn.Module):
    """What it keeps it gets in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.keep)
        return x * self.size

    def keep(self, gradient: Tensor) -> None:
        self.size = 1.0 + float(gradient.abs().mean())


BY_ATTRIBUTE = {
    Mean: "mean", Largest: r"seen", Window: "last", Table: r"sums", FirstBatch: "centre", WarmUp: "calls",
    CoolDown: r"left\.calls", Annealed: "steps", Alternating: "odd", HiddenNorm: "norms", OfGradients: "size",
}  # fmt: skip
AT_RANDOM = (Dropout, Coin, NumpyNoise)

seen_by_all: list[float] = []


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen_by_all.append(float(x.detach().mean()))
        return x + sum(seen_by_all)


class OfTheClass(nn.Module):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            type(self).steps += 1
        return x * (1 + self.steps)


ELSEWHERE = (Global, OfTheClass)


# --- they do not ---------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes, self.kinds = 0, [], Counter()
        self.meter = SimpleNamespace(total=0.0, count=0, scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.kinds[str(x.dtype)] += 1
        self.meter.total += float(x.detach().mean())
        self.meter.count += 1
        return x * self.meter.scale


class Remembering(nn.Module):
    """What it saw last is there to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.shape: tuple[int, ...] = ()
        self.losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.shape = x, tuple(x.shape)
        self.losses["size"] = x.square().mean()
        if self.training:
            self.in_training = x.detach()
        return x * self.shape[1] / 20


class Cached(nn.Module):
    """What it makes of the shape alone it makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.ramps: dict[int, Tensor] = {}
        self.most: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.ramps:
            self.ramps[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        if self.most is None or len(self.most) < len(x):
            self.most = torch.ones(len(x), 1)
        return x * self.ramps[x.shape[1]] * self.most[: len(x)]


class NoisyInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            noise = random.random() + np.random.rand()  # noqa: NPY002
            return x + noise * torch.randn_like(x) / self.steps
        return functional.dropout(x, 0.5, self.training)


class DrawsInVain(nn.Module):
    """Draws in evaluation too, but answers the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand(1)


class Writing(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20, bias=False)
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
            self.frozen.add_(1)
        return self.layer(x) * self.frozen


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.getLogger("of a module")

    def forward(self, x: Tensor) -> Tensor:
        self.logger.debug("seen %d", len(x))
        return 2 * x


class Attention(nn.Module):
    """Keeps its attention map."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 4, 5)
        out, self.map = self.attention(tokens, tokens, tokens)
        return out.flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.recurrent = kind(5, 20, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x.view(-1, 4, 5))[0][:, -1]


class OfBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(20), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return (x - self.mean) * self.seen.sign()


HARMLESS = (
    Counting, Remembering, Cached, NoisyInTraining, DrawsInVain, Logging, Attention, Recurrent, OfBuffers,
    lambda: Recurrent(nn.GRU), lambda: nn.BatchNorm1d(20), lambda: nn.BatchNorm1d(20, momentum=None),
    lambda: nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.LayerNorm(20)), lambda: nn.RReLU(),
)  # fmt: skip
