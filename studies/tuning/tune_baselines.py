"""Tries settings of methods on examples held out from the training data; the test split is not looked at.

    python studies/tuning/tune_baselines.py split-mnist --method ewc-online --grid strength=1,10,100 --json FILE

Learns the stream, or its first tasks, with each combination and prints the accuracy on the held-out examples of all
tasks: when each task had just been learned, and at the end. The seed is one that no table uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from tune import first_tasks

from exssnet.cli.console import one_line_errors
from exssnet.data import Task
from exssnet.experiments.config import RunConfig, resolve, settings_from_text
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.prepare import computing, prepare, train_settings
from exssnet.experiments.together import each, how_many
from exssnet.methods.base import JointMethod
from exssnet.train import Listener, Trainer, accuracy


def main() -> None:
    """Try every combination and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--method", required=True, help="one, or several with commas")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=VALUES", help="values with commas")
    parser.add_argument("--tasks", type=int, help="only the first tasks of the stream")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--held-out", type=float, default=0.1)
    parser.add_argument("--together", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    cut = first_tasks(options.benchmark, options.tasks, options.seed) if options.tasks else {}
    names = ["method", *(entry.partition("=")[0] for entry in options.grid)]
    values = [options.method.split(","), *(entry.partition("=")[2].split(",") for entry in options.grid)]
    tried = list(product(*values))
    configs = [
        resolve(options.benchmark, method, options.seed, validation=options.held_out, **cut,
                **settings_from_text(dict(zip(names[1:], rest, strict=True))))
        for method, *rest in tried
    ]  # fmt: skip
    named = {id(config): " ".join(combination) for config, combination in zip(configs, tried, strict=True)}

    def one(config: RunConfig, listener: Listener) -> dict[str, Any]:
        row = held_out(config, listener)
        print(named[id(config)], *(f"{value:.2f}" for value in row.values()), file=sys.stderr, flush=True)
        return row

    found = each(one, configs, [Listener() for _ in configs], how_many(options.together, configs))
    print(f"{options.benchmark}, seed {options.seed}: held-out accuracy %")
    print(f"| {' | '.join([*names, 'when learned', 'at the end'])} |")
    print("| --- " * (len(names) + 2) + "|")
    for combination, row in zip(tried, found, strict=True):
        print(f"| {' | '.join([*combination, *(f'{value:.2f}' for value in row.values())])} |")
    if options.json:
        rows = [{**dict(zip(names, c, strict=True)), **row} for c, row in zip(tried, found, strict=True)]
        given = {name: str(value) for name, value in vars(options).items() if name != "json"}
        record = {"options": given, "rows": rows, "versions": versions(), "device": device_name(configs[0].device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def held_out(config: RunConfig, listener: Listener) -> dict[str, Any]:
    """Learn the stream; accuracies on its held-out examples, means over the tasks."""
    with computing(config):
        stream, method = prepare(config)
        trainer = Trainer(method, config.seed, train_settings(config), listener)
        tasks = [on(task, config.device) for task in stream]

        def measured(task: Task) -> float:
            assert task.validation is not None
            return accuracy(lambda x: method.logits(x, task.name), task.validation)

        learned = []
        joint = isinstance(method, JointMethod)
        for task in [method.together(tasks)] if joint else tasks:
            trainer.learn(replace(task, validation=None))  # it would be measured after every epoch
            learned += [] if joint else [measured(task)]
        end = [measured(task) for task in tasks]
    return {"when learned": mean(learned or end), "at the end": mean(end)}


def on(task: Task, device: str) -> Task:
    """A task's training and held-out examples on the device."""
    assert task.validation is not None
    return replace(task, train=task.train.to(device), validation=task.validation.to(device))


if __name__ == "__main__":
    with one_line_errors():
        main()
