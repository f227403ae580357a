"""Tries learning rates on the first tasks of a benchmark, and compares them on data held out of the training part.

    python results/tune.py split-cifar100 --tasks 2 --rates 0.003,0.01,0.03 --weight-rates 0.001,0.003,0.01 --out FOLDER

The seed is one that no table uses. The test part decides nothing here.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean

from exssnet.experiments.benchmarks import stream
from exssnet.experiments.config import RunConfig, resolve
from exssnet.experiments.run import run
from exssnet.experiments.together import each, how_many
from exssnet.train import Listener


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    return [float(number) for number in text.split(",")]


def first_tasks(benchmark: str, tasks: int, seed: int) -> dict[str, str | int]:
    """What cuts a benchmark's stream down to its first tasks."""
    whole = resolve(benchmark, "exssnet", seed)
    groups = stream(whole).class_order[:tasks]
    return {"tasks": tasks, "class_order": ",".join(str(label) for group in groups for label in group)}


def held_out(folder: Path) -> dict[str, float]:
    """The accuracy on held-out data after each phase's last epoch, averaged over the tasks."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    ends = [event for event in events if event["event"] == "epoch" and event["epoch"] == event["epochs"]]
    phases = dict.fromkeys(event["phase"] for event in ends)
    return {phase: mean(event["validation"] for event in ends if event["phase"] == phase) for phase in phases}


def main() -> None:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--method", default="exssnet")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--rates", type=numbers, default=[0.003, 0.01, 0.03])
    parser.add_argument("--weight-rates", type=numbers, default=[0.001, 0.003, 0.01])
    parser.add_argument("--mask-epochs", type=int)
    parser.add_argument("--weight-epochs", type=int)
    parser.add_argument("--together", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    first = first_tasks(options.benchmark, options.tasks, options.seed)
    epochs = {"mask_epochs": options.mask_epochs, "weight_epochs": options.weight_epochs}
    configs = [
        resolve(
            options.benchmark, options.method, options.seed, lr=rate, weight_lr=weight_rate, validation=0.1,
            **first, **epochs,
        )
        for rate, weight_rate in product(options.rates, options.weight_rates)
    ]  # fmt: skip

    def folder(config: RunConfig) -> Path:
        return options.out / f"{config.settings['lr']:g}-{config.settings['weight_lr']:g}"

    each(
        lambda config, listener: run(config, folder(config), listener),
        configs,
        [Listener() for _ in configs],
        how_many(options.together, configs),
    )
    print(
        f"{options.benchmark}, first {options.tasks} tasks, {options.method}, seed {options.seed}: held-out accuracy %"
    )
    print("| mask rate | weight rate | after the mask | after the weights |")
    print("| --- | --- | --- | --- |")
    for config in configs:
        found = held_out(folder(config) / config.folder)
        settings = config.settings
        cells = [f"{settings['lr']:g}", f"{settings['weight_lr']:g}", *(f"{value:.2f}" for value in found.values())]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
