"""Time of the Fisher diagonal of a task for EWC, batched and one image at a time: LeNet-300-100, one CPU thread.

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
from exssnet.experiments.run import device_name, versions
from exssnet.methods.shared.fisher import fisher_diagonal
from exssnet.models import build

IMAGES, BATCH = 10_000, 1000

Found = dict[str, Tensor]


def one_at_a_time(network: nn.Module, x: Tensor, y: Tensor) -> Found:
    total = {name: torch.zeros_like(weight) for name, weight in network.named_parameters()}
    for i in range(len(x)):
        network.zero_grad()
        cross_entropy(network(x[i : i + 1]), y[i : i + 1]).backward()
        for name, weight in network.named_parameters():
            total[name] += weight.grad.square()
    return total


def batched(network: nn.Module, x: Tensor, y: Tensor) -> Found:
    weights, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    total = {name: torch.zeros_like(weight) for name, weight in network.named_parameters()}
    for some_x, some_y in zip(x.split(BATCH), y.split(BATCH), strict=True):
        for name, squares in fisher_diagonal(network, weights, buffers, some_x, some_y, cross_entropy).items():
            total[name] += squares
    return total


def timed(work: Callable[[nn.Module, Tensor, Tensor], Found], *arguments: object) -> tuple[float, Found]:
    started = time.perf_counter()
    found = work(*arguments)  # type: ignore[arg-type]
    return time.perf_counter() - started, found


def difference(found: Found, expected: Found) -> float:
    """The largest difference in a layer, relative to the layer's largest value."""
    return max(float((found[name] - value).abs().max() / value.max()) for name, value in expected.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build("lenet-300-100", (1, 28, 28), 10).eval()
    x, y = torch.randn(IMAGES, 1, 28, 28), torch.randint(0, 10, (IMAGES,))
    times: dict[str, list[float]] = {"one at a time": [], "batched": []}
    apart = 0.0
    for round_ in range(options.rounds + 1):
        loop, expected = timed(one_at_a_time, network, x, y)
        ours, found = timed(batched, network, x, y)
        apart = max(apart, difference(found, expected))
        if round_:  # the first round warms up
            times["one at a time"].append(loop)
            times["batched"].append(ours)
    if apart > 1e-5:
        raise SystemExit(f"the results differ by {apart:.1e} of a layer's largest value (bound 1e-5)")
    ratios = [a / b for a, b in zip(times["one at a time"], times["batched"], strict=True)]
    print(f"Fisher diagonal of {IMAGES} images, LeNet-300-100, {device_name('cpu')}, {options.rounds} rounds")
    print(f"batched: {BATCH} at a time")
    for name, values in times.items():
        print(f"{name:14} {statistics.median(values):6.3f} s ({min(values):.3f} to {max(values):.3f})")
    spread = f"({min(ratios):.1f} to {max(ratios):.1f})"
    print(f"ratio          {statistics.median(ratios):6.1f}   {spread} (bound 5)")
    print(f"difference     {apart:.1e} of a layer's largest value, at most")
    if options.json:
        record = {
            "images": IMAGES,
            "batch": BATCH,
            "seconds": times,
            "ratios": ratios,
            "difference": apart,
            "versions": versions(),
            "device": device_name("cpu"),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
