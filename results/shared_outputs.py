"""Joint training as the published program has it: the i-th class of every task has the same output.

    python results/shared_outputs.py split-mnist --json FILE
    python results/shared_outputs.py split-mnist --lr 0.1 --optimizer adam --weight-decay 0.0001 --schedule published

Nothing tells the network which task an image is of, neither in training nor at the test: an output stands for one class
of each task. The settings of the second command are those of the published program's own file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

from exssnet.data.tensors import TensorData, joined
from exssnet.experiments.config import resolve
from exssnet.experiments.run import computing, device_name, prepare, train_settings, versions
from exssnet.train import Trainer, accuracy


def main() -> None:
    """Train, and print the accuracy on every task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--optimizer")
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--schedule")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args())
    benchmark, seed, file = (options.pop(name) for name in ("benchmark", "seed", "json"))
    config = resolve(benchmark, "naive", seed, head="task", **options)
    with computing(config):
        stream, method = prepare(config)
        tasks = list(stream)
        parts = [task.train for task in tasks if isinstance(task.train, TensorData)]
        together = joined(parts, [part.labels for part in parts], max(part.classes for part in parts))
        first = replace(tasks[0], train=together.to(config.device))
        Trainer(method, config.seed, train_settings(config)).learn(first)
        found = [accuracy(lambda x: method.logits(x, first.name), task.test.to(config.device)) for task in tasks]
    print(f"one network on all tasks of {benchmark}, seed {seed}, {config.settings['epochs']} epochs, shared outputs")
    print(", ".join(f"task {number} {value:.2f} %" for number, value in enumerate(found, start=1)))
    print(f"average accuracy {mean(found):.2f} %")
    if file:
        record = {"config": asdict(config), "accuracies": found, "average_accuracy": mean(found)}
        record |= {"versions": versions(), "device": device_name(config.device)}
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
