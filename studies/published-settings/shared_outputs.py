r"""Joint training as the published program has it: the i-th class of every task has the same output.

    python studies/published-settings/shared_outputs.py split-mnist --json FILE
    python studies/published-settings/shared_outputs.py split-mnist --set lr=0.1 --set optimizer=adam \
        --set weight_decay=0.0001 --set schedule=published

Nothing tells the network which task an image is of, neither in training nor at the test: an output stands for one class
of each task. The settings of the second command are those of the published program's own file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

from exssnet.cli.console import one_line_errors
from exssnet.data.tensors import joined
from exssnet.experiments.config import resolve, settings_from_text
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.prepare import computing, prepare, train_settings
from exssnet.train import Trainer, accuracy


def main() -> None:
    """Train, and print the accuracy on every task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = settings_from_text(dict(setting.split("=", 1) for setting in options.set))
    config = resolve(options.benchmark, "naive", options.seed, head="task", **given)
    with computing(config):
        stream, method = prepare(config)
        tasks = list(stream)
        parts = [task.train for task in tasks]
        together = joined(parts, [part.labels for part in parts], max(part.classes for part in parts))
        first = replace(tasks[0], train=together.to(config.device))
        Trainer(method, config.seed, train_settings(config)).learn(first)
        found = [accuracy(lambda x: method.logits(x, first.name), task.test.to(config.device)) for task in tasks]
    epochs = config.settings["epochs"]
    print(f"one network on all tasks of {options.benchmark}, seed {options.seed}, {epochs} epochs, shared outputs")
    print(", ".join(f"task {number} {value:.2f} %" for number, value in enumerate(found, start=1)))
    print(f"average accuracy {mean(found):.2f} %")
    if options.json:
        record = {"config": asdict(config), "accuracies": found, "average_accuracy": mean(found)}
        record |= {"versions": versions(), "device": device_name(config.device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
