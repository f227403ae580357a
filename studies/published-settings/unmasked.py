"""What a test that does not know the task would say of joint training: the other tasks' outputs masked, and not.

    python studies/published-settings/unmasked.py split-mnist --json FILE

Joint training with the outputs of all tasks (`multitask`, head `masked-test`), as the table has it. At the test the
answer is the largest of the task's own outputs, or of all.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

from exssnet.cli.console import one_line_errors
from exssnet.experiments.config import resolve
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.prepare import computing, prepare, train_settings
from exssnet.methods.bounds.multitask import Multitask
from exssnet.train import Trainer, accuracy


def main() -> None:
    """Train, and print both accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = resolve(
        options.benchmark, "multitask", options.seed, head="masked-test", epochs=options.epochs, device=options.device
    )
    with computing(config):
        stream, method = prepare(config)
        assert isinstance(method, Multitask)
        tasks = [replace(task, train=task.train.to(config.device)) for task in stream]
        Trainer(method, config.seed, train_settings(config)).learn(method.together(tasks))
        found: dict[str, list[float]] = {"masked": [], "unmasked": []}
        for task, own in zip(tasks, method.outputs_of.slices, strict=True):
            test = task.test.to(config.device)
            found["masked"].append(accuracy(lambda x, own=own: method.forward(x, training=False)[:, own], test))
            # the outputs turned round so that the task's own come first, as its labels do
            found["unmasked"].append(
                accuracy(lambda x, own=own: method.forward(x, training=False).roll(-own.start, dims=1), test)
            )
    averages = {name: mean(values) for name, values in found.items()}
    print(f"multitask on {options.benchmark}, seed {options.seed}, {config.settings['epochs']} epochs")
    print(", ".join(f"{name} {value:.2f} %" for name, value in averages.items()))
    if options.json:
        record = {"config": config.settings | {"seed": options.seed, "benchmark": options.benchmark}}
        record |= {
            "accuracies": found,
            "averages": averages,
            "versions": versions(),
            "device": device_name(config.device),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
