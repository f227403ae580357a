"""What a step of `Model.learn` costs against a plain loop of the same network: eager, fp32, written as a user would.

    python benchmarks/model_learn.py [--json FILE]
    python benchmarks/model_learn.py --device cpu --small

Both train in one process on data that lies on the device, with Adam. `Model.learn` is measured over whole epochs: what
it does once per task (captures, warm-ups, checks) is left out by taking the difference of a long and a short training.
The plain loop is measured over as many steps. Rounds alternate; times are medians. The bounds are for a GPU, where
`Model` computes in bf16 and captures its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import exssnet
from exssnet.cli.console import one_line_errors
from exssnet.core.partition import stands_for
from exssnet.experiments.environment import device_name, versions
from exssnet.models import build

STEPS = 40  # per epoch
CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """Of the networks and their batches."""

    resnet_width: int = 64
    blocks: int = 6  # of the transformer
    width: int = 384
    heads: int = 6
    tokens: int = 128
    hidden: int = 1000  # units of the MLP
    batch: int = 128
    batch_of_tokens: int = 64


FULL = Sizes()
SMALL = Sizes(resnet_width=8, blocks=2, width=64, heads=2, tokens=16, hidden=300, batch=32, batch_of_tokens=16)
Case = tuple[nn.Module, Tensor, int]  # a network, inputs of an epoch, examples per batch


class Transformer(nn.Module):
    """An encoder over tokens, and a head on their mean."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, sizes.width)
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.heads, 4 * sizes.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, sizes.blocks, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return out


def resnet(sizes: Sizes) -> Case:
    return (
        build("resnet18", (3, 32, 32), CLASSES, sizes.resnet_width),
        torch.randn(sizes.batch * STEPS, 3, 32, 32),
        sizes.batch,
    )


def transformer(sizes: Sizes) -> Case:
    tokens = torch.randint(0, 1000, (sizes.batch_of_tokens * STEPS, sizes.tokens))
    return Transformer(sizes), tokens, sizes.batch_of_tokens


def mlp(sizes: Sizes) -> Case:
    layers = [nn.Linear(784, sizes.hidden), nn.ReLU(), nn.Linear(sizes.hidden, sizes.hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes.hidden, CLASSES)), torch.randn(sizes.batch * STEPS, 784), sizes.batch


NETWORKS: dict[str, Callable[[Sizes], Case]] = {"resnet18": resnet, "transformer": transformer, "mlp": mlp}
BOUNDS = {"resnet18": 0.25, "transformer": 0.40, "mlp": 0.30}  # of the ratio, on a GPU


def plain(module: nn.Module, x: Tensor, y: Tensor, batch: int, epochs: int) -> float:
    """Seconds of a plain loop."""
    optimizer = torch.optim.Adam(module.parameters(), 0.001)
    synchronize(x)
    started = time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(x), device=x.device).split(batch):
            loss = cross_entropy(module(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    synchronize(x)
    return time.perf_counter() - started


def learned(model: exssnet.Model, x: Tensor, y: Tensor, batch: int, epochs: int, name: str) -> float:
    """Seconds of learning a task, half of the epochs for its mask and half for its weights."""
    synchronize(x)
    started = time.perf_counter()
    model.learn(name, (x, y), epochs=(epochs // 2, epochs - epochs // 2), batch_size=batch, lr=0.001, weight_lr=0.001)
    synchronize(x)
    return time.perf_counter() - started


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(network: str, options: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    module, x, batch = NETWORKS[network](SMALL if options.small else FULL)
    x = x.to(options.device)
    y = torch.randint(0, CLASSES, (len(x),), device=options.device)
    private = [word for word in ("norm", "bias") if stands_for(module, word)]
    model = exssnet.Model(module, method="exssnet", private=private, density=0.01, device=options.device)
    module.to(options.device)
    plain(module, x, y, batch, 1)
    short = [learned(model, x, y, batch, 2, f"short {number}") for number in range(2)][1]
    ours, theirs = [], []
    steps = options.epochs * STEPS
    for number in range(options.rounds):
        ours.append(1000 * (learned(model, x, y, batch, 2 + options.epochs, f"long {number}") - short) / steps)
        theirs.append(1000 * plain(module, x, y, batch, options.epochs) / steps)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    found = {
        "network": network, "ms": statistics.median(ours), "plain_ms": statistics.median(theirs),
        "ratio": statistics.median(ratios), "ratios": ratios, "bound": options.bounds.get(network),
    }  # fmt: skip
    bound = f"; at most {found['bound']} wanted" if found["bound"] else ""
    print(f"{network:12} {found['ms']:8.3f} ms a step, plain loop {found['plain_ms']:8.3f} ms, ratio "
          f"{found['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}){bound}", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of these, with commas")
    parser.add_argument("--small", action="store_true", help="networks and batches that a CPU can train")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8, help="that are measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = sorted(set(options.networks.split(",")) - set(NETWORKS))
    if unknown:
        parser.error(f"unknown network '{unknown[0]}': choose of {', '.join(NETWORKS)}")
    torch.set_num_threads(1)
    options.bounds = BOUNDS if options.device == "cuda" and not options.small else {}
    print(f"{'small networks, ' * options.small}{device_name(options.device)}, {options.rounds} rounds")
    rows = [measure(name, options) for name in options.networks.split(",")]
    if options.json:
        sizes = asdict(SMALL if options.small else FULL)
        record = {"rows": rows, "sizes": sizes, "versions": versions(), "device": device_name(options.device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
