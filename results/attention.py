"""How firmly HAT holds what a task uses, and what happens if it holds all of it.

    python results/attention.py split-cifar100 --samples-per-class 100 --epochs 10 --device cpu --json FILE

Attention is seldom quite 0 or 1. A weight between two units with the attention a takes 1 − a of every later step, which
over thousands of steps is a long way also where a is 0.99. Two runs side by side: HAT as it is, and one that after each
task holds every unit whole whose attention is above a millionth.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exssnet.experiments.config import RunConfig, resolve
from exssnet.experiments.run import computing, device_name, prepare, train_settings, versions
from exssnet.experiments.together import each, how_many
from exssnet.methods.hat import Hat
from exssnet.train import Listener, Trainer, accuracy

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
    held = {"as it is": False, "whole": True}
    configs = [resolve(options.benchmark, "hat", options.seed, **given) for _ in held]
    whole = {id(config): value for config, value in zip(configs, held.values(), strict=True)}

    def one(config: RunConfig, listener: Listener) -> dict[str, Any]:
        return looked_into(config, listener, whole=whole[id(config)])

    runs = each(one, configs, [Listener() for _ in configs], how_many("auto", configs))
    print(f"HAT on {options.benchmark}, seed {options.seed}, {configs[0].settings['epochs']} epochs a task")
    for name, run in zip(held, runs, strict=True):
        print(f"\nused units held {name}: accuracy of each task when learned, and at the end")
        for number, (task, end) in enumerate(zip(run["tasks"], run["accuracies"][-1], strict=True), start=1):
            print(f"task {number}: {task['accuracy']:.2f} %, {end:.2f} %; uses {task['uses']:.1f} % of the units; "
                  f"held in part {task['in part']:.1f} % of them, by {100 * task['hold']:.1f} %")  # fmt: skip
        print(f"average accuracy {run['average_accuracy']:.2f} %, forgetting {run['forgetting']:.2f}")
    if options.json:
        facts = {"config": configs[0].settings | given | {"seed": options.seed, "benchmark": options.benchmark}}
        record = facts | dict(zip(held, runs, strict=True))
        record |= {"versions": versions(), "device": device_name(configs[0].device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def looked_into(config: RunConfig, listener: Listener, *, whole: bool) -> dict[str, Any]:
    """Learn the stream; of each task how much it uses and how firmly that is held, and all accuracies."""
    with computing(config):
        stream, method = prepare(config)
        assert isinstance(method, Hat)
        trainer = Trainer(method, config.seed, train_settings(config), listener)
        tasks = [replace(t, train=t.train.to(config.device), test=t.test.to(config.device)) for t in stream]
        rows, accuracies = [], []
        for task in tasks:
            trainer.learn(task)
            own = torch.sigmoid(method.settings.s_max * method.gates.detach()) > NEAR
            loose = own & (method.used < 1 - NEAR)
            hold = method.used[loose].mean().item() if loose.any() else 1.0
            if whole:
                method.used = torch.where(method.used > NEAR, 1.0, method.used)
            accuracies.append([
                accuracy(lambda x, name=earlier.name: method.logits(x, name), earlier.test)
                for earlier in tasks[: task.index + 1]
            ])  # fmt: skip
            rows.append({
                "uses": 100 * own.float().mean().item(), "in part": (100 * loose.sum() / own.sum()).item(),
                "hold": hold, "accuracy": accuracies[-1][-1],
            })  # fmt: skip
    end = accuracies[-1]
    lost = [row["accuracy"] - now for row, now in zip(rows, end, strict=True)][:-1]
    return {"tasks": rows, "accuracies": accuracies, "average_accuracy": sum(end) / len(end),
            "forgetting": sum(lost) / len(lost)}  # fmt: skip


if __name__ == "__main__":
    main()
