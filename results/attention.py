"""How much of HAT's attention is neither 0 nor 1, so that units are held in part: after every task of a run.

    python results/attention.py split-cifar100 --samples-per-class 100 --epochs 10 --device cpu --json FILE

A unit is on or off where its attention is closer than a millionth to 1 or 0. A weight between two units that are partly
on takes 1 − a of each step; over thousands of steps that is a long way also where a is 0.99.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from exssnet.data.task import Task
from exssnet.experiments.config import resolve
from exssnet.experiments.run import run
from exssnet.methods.hat import Hat

NEAR = 1e-6


def main() -> None:
    """Make the run and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--samples-per-class", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    end_task = Hat.end_task

    def watched(method: Hat, task: Task) -> None:
        end_task(method, task)
        own = torch.sigmoid(method.settings.s_max * method.gates.detach())
        row: dict[str, Any] = {"task": task.index + 1}
        for name, attention in (("own", own), ("so far", method.used)):
            off, on = attention < NEAR, attention > 1 - NEAR
            shares = {"off": off, "partly on": ~off & ~on, "on": on}
            row[name] = {kind: 100 * which.float().mean().item() for kind, which in shares.items()}
        rows.append(row)
        print(
            f"task {row['task']}: "
            + "; ".join(
                f"{name} " + ", ".join(f"{share:.1f} % {kind}" for kind, share in row[name].items())
                for name in ("own", "so far")
            ),
            flush=True,
        )

    Hat.end_task = watched  # type: ignore[method-assign]
    config = resolve(
        options.benchmark, "hat", options.seed, samples_per_class=options.samples_per_class, epochs=options.epochs,
        device=options.device,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        record = run(config, Path(folder))
    print(f"average accuracy {record['average_accuracy']:.2f} %, forgetting {record['forgetting']:.2f}")
    if options.json:
        found = {"tasks": rows, "average_accuracy": record["average_accuracy"], "forgetting": record["forgetting"]}
        options.json.write_text(json.dumps(found | {"config": record["config"]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
