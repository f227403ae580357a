"""What KKT costs: its share of a task's time, from a run's own record, for all tasks that have one to borrow from.

EXSSNET_DATA=... python benchmarks/transfer.py --json results/performance/transfer.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from exssnet.experiments.config import resolve
from exssnet.experiments.run import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--benchmark", default="split-mnist")
    parser.add_argument("--mask-epochs", type=int)
    parser.add_argument("--weight-epochs", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    epochs = {"mask_epochs": options.mask_epochs, "weight_epochs": options.weight_epochs}
    config = resolve(options.benchmark, "exssnet+kkt", 0, **epochs)
    with tempfile.TemporaryDirectory() as folder:
        record = run(config, Path(folder))
    tasks = record["seconds"]["tasks"][1:]
    shares = [task["setup"] / (task["mask"] + task.get("weights", 0.0)) for task in tasks]
    print(f"{options.benchmark}, {config.settings['mask_epochs']} + {config.settings['weight_epochs']} epochs, "
          f"{record['device']}")  # fmt: skip
    for number, (task, share) in enumerate(zip(tasks, shares, strict=True), start=2):
        spent, trained = 1000 * task["setup"], task["mask"] + task.get("weights", 0.0)
        print(f"task {number}: {spent:7.1f} ms of KKT for {trained:6.1f} s of training, {100 * share:.2f} %")
    print(f"largest share {100 * max(shares):.2f} %; at most 1 % wanted")
    if options.json:
        facts = {"shares": shares, "seconds": tasks, "device": record["device"], "versions": record["versions"]}
        options.json.write_text(json.dumps(facts | {"config": record["config"]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
