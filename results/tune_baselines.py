"""Tries settings of a method on examples held out from the training data; the test split is not looked at.

    python results/tune_baselines.py split-mnist --method ewc-online --grid strength=1,10,100 --json FILE

Learns the stream with each combination and prints, over the held-out examples of all tasks, the accuracy at the end and
that when each task had just been learned.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from exssnet.experiments.config import resolve, settings_from_text
from exssnet.experiments.run import computing, device_name, prepare, versions
from exssnet.methods.multitask import Multitask
from exssnet.train import Trainer, TrainSettings, accuracy


def main() -> None:
    """Try every combination and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--method", required=True)
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=VALUES", help="values with commas")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--held-out", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    names = [entry.partition("=")[0] for entry in options.grid]
    values = [entry.partition("=")[2].split(",") for entry in options.grid]
    rows = []
    print(f"{options.benchmark}, {options.method}, seed {options.seed}: held-out accuracy %")
    print(f"| {' | '.join([*names, 'when learned', 'at the end'])} |")
    print("| --- " * (len(names) + 2) + "|")
    for combination in product(*values):
        settings = settings_from_text(dict(zip(names, combination, strict=True)))
        learned, end = held_out(options.benchmark, options.method, options.seed, options.held_out, settings)
        rows.append({**settings, "when_learned": learned, "at_the_end": end})
        print(f"| {' | '.join([*combination, f'{learned:.2f}', f'{end:.2f}'])} |", flush=True)
    if options.json:
        given = {name: str(value) for name, value in vars(options).items() if name != "json"}
        record = {"options": given, "rows": rows, "versions": versions(), "device": device_name(device())}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def held_out(benchmark: str, method: str, seed: int, share: float, settings: dict[str, object]) -> tuple[float, float]:
    """Accuracy on the held-out examples, when a task had just been learned and at the end; means over the tasks."""
    config = resolve(benchmark, method, seed, validation=share, **settings)
    learned, tasks = [], []
    with computing(config):
        stream, learner = prepare(config)
        train = TrainSettings(config.batch_size, config.optimizer, config.select, config.weight_decay)
        trainer = Trainer(learner, seed, train)

        def measure(index: int) -> float:
            assert tasks[index].validation is not None
            return accuracy(lambda x: learner.logits(x, tasks[index].name), tasks[index].validation.to(config.device))

        for task in stream:
            tasks.append(task)
            if not isinstance(learner, Multitask):
                trainer.learn(on(task, config.device))
                learned.append(measure(-1))
        if isinstance(learner, Multitask):
            trainer.learn(learner.together([on(task, config.device) for task in tasks]))
        end = [measure(index) for index in range(len(tasks))]
    return mean(learned or end), mean(end)


def on(task, device):  # type: ignore[no-untyped-def]
    """A task without its held-out part, which would be measured after every epoch."""
    from dataclasses import replace

    return replace(task, train=task.train.to(device), validation=None)


def device() -> str:
    """Where runs compute by themselves."""
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
