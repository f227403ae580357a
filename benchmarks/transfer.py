"""What KKT costs: its share of a task's time, from a run's own record, for all tasks that have one to borrow from.

EXSSNET_DATA=... python benchmarks/transfer.py --json results/performance/transfer.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from exssnet.experiments.config import resolve
from exssnet.experiments.run import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--benchmark", default="split-mnist")
    parser.add_argument("--mask-epochs", type=int)
    parser.add_argument("--weight-epochs", type=int)
    parser.add_argument("--seeds", type=int, default=3, help="so many runs, one after the other")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    epochs = {"mask_epochs": options.mask_epochs, "weight_epochs": options.weight_epochs}
    configs = [resolve(options.benchmark, "exssnet+kkt", seed, **epochs) for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as folder:
        records = [run(config, Path(folder)) for config in configs]
    settings, record = configs[0].settings, records[0]
    print(f"{options.benchmark}, {settings['mask_epochs']} + {settings['weight_epochs']} epochs, "
          f"{options.seeds} runs, {record['device']}")  # fmt: skip
    by_task = list(zip(*(found["seconds"]["tasks"][1:] for found in records), strict=True))
    shares = [[task["setup"] / trained(task) for task in runs] for runs in by_task]
    for number, (runs, some) in enumerate(zip(by_task, shares, strict=True), start=2):
        spent, training = (statistics.median(map(what, runs)) for what in (lambda task: task["setup"], trained))
        print(f"task {number}: {1000 * spent:7.1f} ms of KKT for {training:6.1f} s of training, "
              f"{100 * statistics.median(some):.2f} % ({100 * min(some):.2f} to {100 * max(some):.2f})")  # fmt: skip
    print(f"largest share {100 * max(map(max, shares)):.2f} %; at most 1 % wanted")
    if options.json:
        facts = {"shares": shares, "seconds": by_task, "device": record["device"], "versions": record["versions"]}
        options.json.write_text(json.dumps(facts | {"config": record["config"]}, indent=1) + "\n")


def trained(task: dict[str, float]) -> float:
    """Seconds of training."""
    return task["mask"] + task.get("weights", 0.0)


if __name__ == "__main__":
    main()
