"""Tries learning rates and weight decays on the first tasks of a benchmark, and compares them on held-out data.

    python studies/tuning/tune.py split-cifar100 --tasks 3 --weight-rates 0.003,0.01 --decays 0,0.1 --out FOLDER

The held-out data is a share of each class's training data, the seed one that no table uses. The test part decides
nothing here. Without decay the optimizer is Adam, with it AdamW.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean

from exssnet.cli.console import one_line_errors
from exssnet.experiments.config import RunConfig, resolve
from exssnet.experiments.recipes import stream
from exssnet.experiments.run import run
from exssnet.experiments.together import each, how_many
from exssnet.train import Listener


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    return [float(number) for number in text.split(",")]


def first_tasks(benchmark: str, tasks: int, seed: int) -> dict[str, str | int]:
    """What cuts a benchmark's stream down to its first tasks."""
    whole = resolve(benchmark, "exssnet", seed)
    if whole.stream != "split":
        return {"tasks": tasks}  # they have an order of their own
    groups = stream(whole).class_order[:tasks]
    return {"tasks": tasks, "class_order": ",".join(str(label) for group in groups for label in group)}


def values(config: RunConfig) -> list[str]:
    """What is tried."""
    return [f"{value:g}" for value in (config.settings["lr"], config.settings["weight_lr"], config.weight_decay or 0)]


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
    parser.add_argument("--rates", type=numbers, default=[0.01])
    parser.add_argument("--weight-rates", type=numbers, default=[0.01])
    parser.add_argument("--decays", type=numbers, default=[0.0])
    parser.add_argument("--held-out", type=float, default=0.2)
    parser.add_argument("--mask-epochs", type=int)
    parser.add_argument("--weight-epochs", type=int)
    parser.add_argument("--encoder", help="of texts")
    parser.add_argument("--sample", type=int, help="of texts: training rows a class")
    parser.add_argument("--together", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    first = first_tasks(options.benchmark, options.tasks, options.seed)
    epochs = {"mask_epochs": options.mask_epochs, "weight_epochs": options.weight_epochs}
    texts = {"encoder": options.encoder, "sample": options.sample}
    configs = [
        resolve(
            options.benchmark, options.method, options.seed, lr=rate, weight_lr=weight_rate, optimizer="adamw",
            weight_decay=decay, validation=options.held_out, **first, **epochs, **texts,
        )
        for rate, weight_rate, decay in product(options.rates, options.weight_rates, options.decays)
    ]  # fmt: skip

    def folder(config: RunConfig) -> Path:
        return options.out / "-".join(values(config))

    each(
        lambda config, listener: run(config, folder(config), listener),
        configs,
        [Listener() for _ in configs],
        how_many(options.together, configs),
    )
    print(
        f"{options.benchmark}, first {options.tasks} tasks, {options.method}, seed {options.seed}: held-out accuracy %"
    )
    print("| mask rate | weight rate | decay | after the mask | after the weights |")
    print("| --- | --- | --- | --- | --- |")
    for config in configs:
        found = held_out(folder(config) / config.folder)
        cells = [*values(config), *(f"{value:.2f}" for value in found.values())]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    with one_line_errors():
        main()
