"""Time of the product of a batch with a masked Linear layer, compared with the dense product.

    python benchmarks/linear.py [--json FILE]

One CPU thread. The two alternate; times and ratios are medians over rounds. `equal` is the fraction of outputs that
are equal bit for bit, which depends on the order of additions in the matrix library.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from exssnet.cli.console import one_line_errors
from exssnet.engine.cpu.linear import packed
from exssnet.engine.cpu.linear_numba import product
from exssnet.experiments.run import device_name, versions

LAYERS = ((300, 784), (1000, 1000), (100, 300))  # outputs, inputs
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
BATCHES = (52, 64, 104, 256)


def seconds(work: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measured(rows: int, width: int, density: float, batch: int, rounds: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(rows, width, generator=draw) < density
    weight, x = torch.randn(rows, width, generator=draw) * mask, torch.randn(batch, width, generator=draw)
    words = packed(mask.view(-1))
    ways = {"masked": lambda: product(x, weight, None, words), "dense": lambda: linear(x, weight)}
    equal = (ways["masked"]() == ways["dense"]()).float().mean().item()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            times[name].append(1e6 * seconds(work))
    ratios = [a / b for a, b in zip(times["masked"], times["dense"], strict=True)]
    return {
        "outputs": rows, "inputs": width, "density": density, "batch": batch, "equal": equal,
        "masked_us": statistics.median(times["masked"]), "dense_us": statistics.median(times["dense"]),
        "ratio": statistics.median(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{device_name('cpu')}, {options.rounds} rounds")
    print("  layer        density  batch   masked µs   dense µs   ratio   equal")
    found = []
    for rows, width in LAYERS:
        for density in DENSITIES:
            for batch in BATCHES:
                row = measured(rows, width, density, batch, options.rounds)
                found.append(row)
                print(f"{rows:5} × {width:<5} {density:9} {batch:6} {row['masked_us']:11.0f} {row['dense_us']:10.0f} "
                      f"{row['ratio']:7.2f} {row['equal']:7.3f}", flush=True)  # fmt: skip
    if options.json:
        record = {"rows": found, "versions": versions(), "device": device_name("cpu")}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
