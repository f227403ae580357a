"""Time of a step of `Model.learn` compared with a plain eager fp32 loop of the same network.

    python benchmarks/model.py [--json FILE]

Both train in one process on data on the device, with Adam. `Model.learn` is measured over whole epochs; the difference
of a long and a short training excludes what it does once (capture, warm-up, checks of a task). The plain loop is
measured over the same number of steps. Rounds alternate; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import exssnet
from exssnet.cli.console import one_line_errors
from exssnet.core.partition import stands_for
from exssnet.experiments.run import device_name, versions
from exssnet.models import build

STEPS = 40  # in an epoch


class Transformer(nn.Module):
    """Six layers of width 384 over 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 384)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return out


def resnet(device: str) -> tuple[nn.Module, Tensor, int]:
    return build("resnet18", (3, 32, 32), 10, 64), torch.randn(128 * STEPS, 3, 32, 32, device=device), 128


def transformer(device: str) -> tuple[nn.Module, Tensor, int]:
    return Transformer(), torch.randint(0, 1000, (64 * STEPS, 128), device=device), 64


def mlp(device: str) -> tuple[nn.Module, Tensor, int]:
    layers = [nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)]
    return nn.Sequential(*layers), torch.randn(128 * STEPS, 784, device=device), 128


NETWORKS: dict[str, Callable[[str], tuple[nn.Module, Tensor, int]]] = {
    "resnet18-width-64": resnet, "transformer-6x384": transformer, "mlp-784-1000-1000": mlp,
}  # fmt: skip
BOUNDS = {"resnet18-width-64": 0.25, "transformer-6x384": 0.40, "mlp-784-1000-1000": 0.30}


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


def measure(network: str, device: str, rounds: int, epochs: int) -> dict[str, object]:
    torch.manual_seed(0)
    module, x, batch = NETWORKS[network](device)
    y = torch.randint(0, 10, (len(x),), device=device)
    private = [word for word in ("norm", "bias") if stands_for(module, word)]
    model = exssnet.Model(module, method="exssnet", private=private, density=0.01, device=device)
    module.to(device)
    plain(module, x, y, batch, 1)
    short = [learned(model, x, y, batch, 2, f"short {number}") for number in range(2)][1]
    ours, theirs = [], []
    for number in range(rounds):
        ours.append(1000 * (learned(model, x, y, batch, 2 + epochs, f"long {number}") - short) / (epochs * STEPS))
        theirs.append(1000 * plain(module, x, y, batch, epochs) / (epochs * STEPS))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    found = {
        "network": network, "ms": statistics.median(ours), "plain_ms": statistics.median(theirs),
        "ratio": statistics.median(ratios), "ratios": ratios, "bound": BOUNDS[network],
    }  # fmt: skip
    print(f"{network:20} {found['ms']:8.3f} ms per step, plain loop {found['plain_ms']:8.3f} ms, ratio "
          f"{found['ratio']:.3f} (bound {BOUNDS[network]})", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(name, options.device, options.rounds, options.epochs) for name in options.networks.split(",")]
    if options.json:
        record = {"rows": rows, "versions": versions(), "device": device_name(options.device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
