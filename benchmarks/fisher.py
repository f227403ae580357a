"""The Fisher diagonal of a task, as EWC needs it, against one image at a time: LeNet-300-100, on one CPU thread.

    python benchmarks/fisher.py --json studies/performance/fisher.json

Both run over all images in one process, alternating, and their results are compared.
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

from exssnet.cli.console import one_line_errors
from exssnet.experiments.environment import device_name, versions
from exssnet.methods.regularize._fisher import fisher_diagonal
from exssnet.methods.shared.flat_network import FlatNetwork
from exssnet.models import build

BATCH, CLASSES = 1000, 10
BOUND = 5  # times as fast, at least


def one_at_a_time(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = list(module.parameters())
    total = [torch.zeros_like(weight) for weight in weights]
    for i in range(len(x)):
        module.zero_grad()
        cross_entropy(module(x[i : i + 1]), y[i : i + 1]).backward()
        for of_layer, weight in zip(total, weights, strict=True):
            of_layer += weight.grad.square()
    return torch.cat([of_layer.view(-1) for of_layer in total])


def batched(network: FlatNetwork, x: Tensor, y: Tensor) -> Tensor:
    pairs = zip(x.split(BATCH), y.split(BATCH), strict=True)
    return sum((fisher_diagonal(network, *pair, slice(0, CLASSES)) for pair in pairs), torch.zeros(network.layout.size))


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def difference(network: FlatNetwork, found: Tensor, expected: Tensor) -> float:
    """The largest difference in a layer, as a share of the layer's largest value."""
    pairs = zip(network.layout.slices(found - expected), network.layout.slices(expected), strict=True)
    return max(float(of_layer.abs().max() / layer.max()) for of_layer, layer in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build("lenet-300-100", (1, 28, 28), CLASSES).eval()
    network = FlatNetwork(module)
    x, y = torch.randn(options.images, 1, 28, 28), torch.randint(0, CLASSES, (options.images,))
    times: dict[str, list[float]] = {"one at a time": [], "batched": []}
    largest = 0.0
    for round_ in range(options.rounds + 1):
        loop, expected = timed(lambda: one_at_a_time(module, x, y))
        ours, found = timed(lambda: batched(network, x, y))
        largest = max(largest, difference(network, found, expected))
        if round_:  # the first one warms up
            times["one at a time"].append(loop)
            times["batched"].append(ours)
    if largest > 1e-5:
        raise SystemExit(f"the two differ by {largest:.1e} of a layer's largest value: at most 1e-5 wanted")
    ratios = [a / b for a, b in zip(times["one at a time"], times["batched"], strict=True)]
    print(f"Fisher diagonal of {options.images} images, LeNet-300-100, {device_name('cpu')}, {options.rounds} rounds")
    print(f"batched: {BATCH} at a time")
    for name, values in times.items():
        print(f"{name:14} {statistics.median(values):6.3f} s ({min(values):.3f} to {max(values):.3f})")
    spread = f"({min(ratios):.1f} to {max(ratios):.1f})"
    print(f"ratio          {statistics.median(ratios):6.1f}   {spread}; at least {BOUND} wanted")
    print(f"difference     {largest:.1e} of a layer's largest value, at most")
    if options.json:
        record = {
            "images": options.images,
            "batch": BATCH,
            "seconds": times,
            "ratios": ratios,
            "difference": largest,
            "versions": versions(),
            "device": device_name("cpu"),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
