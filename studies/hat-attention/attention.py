"""How firmly HAT holds what a task uses, and what happens if it holds all of it.

    python studies/hat-attention/attention.py split-cifar100 --json FILE

Attention is seldom quite 0 or 1. A weight between two units with the attention a takes 1 − a of every later step, which
over thousands of steps is a long way also where a is 0.99. Two runs: HAT as it is, and one that after each task holds
every unit whole whose attention is above a millionth.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from exssnet.cli.console import one_line_errors
from exssnet.experiments.config import RunConfig, resolve
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.metrics import average_accuracy, forgetting
from exssnet.experiments.prepare import computing, prepare, train_settings
from exssnet.methods.gates.hat import Hat
from exssnet.train import Trainer, accuracy

NEAR = 1e-6


def main() -> None:
    """Make both runs and print what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples-per-class", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = {"samples_per_class": options.samples_per_class, "epochs": options.epochs, "device": options.device}
    config = resolve(options.benchmark, "hat", options.seed, **given)
    print(f"HAT on {options.benchmark}, seed {options.seed}, {config.settings['epochs']} epochs a task")
    record: dict[str, Any] = {"config": asdict(config), "versions": versions(), "device": device_name(config.device)}
    for name, whole in (("as it is", False), ("whole", True)):
        record[name] = run = learn_and_measure(config, whole=whole)
        print(f"\nused units held {name}: accuracy of each task when learned, and at the end")
        for number, task in enumerate(run["tasks"], start=1):
            print(
                f"task {number}: {task['learned']:.2f} %, {task['end']:.2f} %; uses {task['used_percent']:.1f} %; "
                f"{task['loose_percent']:.1f} % of that with less than 1, {task['loose_attention']:.3f} on average"
            )
        print(f"average accuracy {run['average_accuracy']:.2f} %, forgetting {run['forgetting']:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def learn_and_measure(config: RunConfig, *, whole: bool) -> dict[str, Any]:
    """Learn the stream; of each task how much it uses and how firmly that is held, and all accuracies."""
    tasks: list[dict[str, float]] = []
    matrix: list[list[float]] = []
    with computing(config):
        stream, method = prepare(config)
        assert isinstance(method, Hat)
        trainer = Trainer(method, config.seed, train_settings(config))
        learned = []
        for task in stream:
            trainer.learn(replace(task, train=task.train.to(config.device)))
            used = torch.sigmoid(method.settings.s_max * method.gates.detach()) > NEAR
            loose = used & (method.used < 1 - NEAR)
            tasks.append({
                "used_percent": 100 * used.float().mean().item(),
                "loose_percent": 100 * loose.sum().item() / max(used.sum().item(), 1),
                "loose_attention": method.used[loose].mean().item() if loose.any() else 1.0,
            })  # fmt: skip
            if whole:
                method.used = torch.where(method.used > NEAR, 1.0, method.used)
            learned.append((task.name, task.test.to(config.device)))
            matrix.append([accuracy(lambda x, name=name: method.logits(x, name), test) for name, test in learned])
    for number, found in enumerate(tasks):
        found |= {"learned": matrix[number][number], "end": matrix[-1][number]}
    return {"tasks": tasks, "accuracy_matrix": matrix, "average_accuracy": average_accuracy(matrix),
            "forgetting": forgetting(matrix)}  # fmt: skip


if __name__ == "__main__":
    with one_line_errors():
        main()
