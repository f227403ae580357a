"""Time of a run compared with a plain PyTorch loop: SplitMNIST, 1 + 1 epochs, on a CPU, alternating in one process.

    EXSSNET_DATA=... python benchmarks/loop.py --json studies/performance/loop.json

The plain loop trains the dense network for the same number of steps on float tensors in memory, without masks,
evaluation, digests or records. Start-up and data loading are excluded from both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from exssnet.cli.console import one_line_errors
from exssnet.experiments.config import RunConfig, resolve
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.recipes import stream
from exssnet.experiments.run import run
from exssnet.models import build


def plain(tasks: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in tasks:
        network = build("lenet-300-100", (1, 28, 28), 2)
        optimizer = torch.optim.Adam(network.parameters(), 0.001)
        for _ in range(2):
            for index in torch.randperm(len(x)).split(64):
                loss = cross_entropy(network(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def ours(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder))


def timed(work: object, *arguments: object) -> float:
    started = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = resolve("split-mnist", "exssnet", 0, mask_epochs=1, weight_epochs=1, device="cpu")
    loaded = [task.train.batch(torch.arange(len(task.train))) for task in stream(config)]
    times: dict[str, list[float]] = {"plain loop": [], "exssnet": []}
    for round_ in range(options.rounds + 1):
        mine, theirs = timed(ours, config), timed(plain, loaded)
        if round_:  # the first round warms up
            times["exssnet"].append(mine)
            times["plain loop"].append(theirs)
    ratios = [a / b for a, b in zip(times["exssnet"], times["plain loop"], strict=True)]
    print(f"SplitMNIST, 1 + 1 epochs, {device_name('cpu')}, {options.rounds} rounds")
    for name, values in times.items():
        print(f"{name:12} {statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})")
    print(f"ratio        {statistics.median(ratios):6.3f}   ({min(ratios):.3f} to {max(ratios):.3f}, bound 1.2)")
    if options.json:
        record = {"seconds": times, "ratios": ratios, "versions": versions(), "device": device_name("cpu")}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
