"""Time of KKT relative to a task's training, for all tasks after the first.

    EXSSNET_DATA=... python benchmarks/transfer.py --json studies/performance/transfer.json
    EXSSNET_DATA=... python benchmarks/transfer.py --seeds 15 --json studies/performance/transfer-h200.json

Runs with and without KKT alternate. The time of KKT is the time before training minus the same time without KKT, which
also draws new scores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from exssnet.cli.console import one_line_errors
from exssnet.experiments.config import resolve
from exssnet.experiments.run import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--benchmark", default="split-mnist")
    parser.add_argument("--mask-epochs", type=int)
    parser.add_argument("--weight-epochs", type=int)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs, in sequence")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    epochs = {"mask_epochs": options.mask_epochs, "weight_epochs": options.weight_epochs}
    methods = ("exssnet+kkt", "exssnet")
    configs = [resolve(options.benchmark, name, seed, **epochs) for seed in range(options.seeds) for name in methods]
    with tempfile.TemporaryDirectory() as folder:
        records = [run(config, Path(folder)) for config in configs]
    settings, record = configs[0].settings, records[0]
    print(f"{options.benchmark}, {settings['mask_epochs']} + {settings['weight_epochs']} epochs, "
          f"{options.seeds} runs, {record['device']}")  # fmt: skip
    by_task, plain = (tasks_of(records[first::2]) for first in (0, 1))
    shares = []
    for number, (runs, without) in enumerate(zip(by_task, plain, strict=True), start=2):
        less = statistics.median(task["setup"] for task in without)
        spent = statistics.median(task["setup"] - less for task in runs)
        some = [(task["setup"] - less) / trained(task) for task in runs]
        shares.append(some)
        training = statistics.median(map(trained, runs))
        print(f"task {number}: {1000 * spent:7.1f} ms of KKT for {training:6.1f} s of training, "
              f"{100 * statistics.median(some):.2f} % ({100 * min(some):.2f} to {100 * max(some):.2f})")  # fmt: skip
    largest, of_a_run = max(map(statistics.median, shares)), max(map(max, shares))
    print(f"largest share {100 * largest:.2f} %, {100 * of_a_run:.2f} % in a single run (bound 3 %)")
    if options.json:
        facts = {"shares": shares, "seconds": by_task, "without": plain}
        facts |= {name: record[name] for name in ("device", "versions", "config")}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def tasks_of(records: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Seconds of all tasks but the first, task by task, of all runs."""
    return [list(task) for task in zip(*(record["seconds"]["tasks"][1:] for record in records), strict=True)]


def trained(task: dict[str, float]) -> float:
    """Seconds of training."""
    return task["mask"] + task.get("weights", 0.0)


if __name__ == "__main__":
    with one_line_errors():
        main()
