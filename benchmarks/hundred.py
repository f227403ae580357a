"""A hundred tasks in one model directory: seconds per task, bytes on disk, every task verified.

    python benchmarks/hundred.py --json studies/performance/hundred.json --figure docs/hundred.svg

scikit-learn's digits with another permutation of pixels for each task are learned from .npz files in sequence, as by
`exssnet learn`, into a LeNet-300-100. The bytes on disk are compared with the paper's formula (32 bits for each trained
weight, at most all, and one bit per weight and task), and with one dense network per task.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from exssnet import Model
from exssnet.cli.console import one_line_errors
from exssnet.experiments.environment import device_name, versions

WIDTH, DENSITY = 1.0, 0.05
SHOWN = (1, 10, 25, 50, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=5, help="epochs per phase")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    digits = load_digits()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        model = Model.create(Path(place, "model"), "lenet-300-100", input=(64,), width=WIDTH, density=DENSITY,
                             method="exssnet")  # fmt: skip
        for task in range(options.tasks):
            order = np.random.default_rng(task).permutation(64)
            file = Path(place, "task.npz")
            np.savez(file, x=(digits.data[:, order] / 16).astype(np.float32), y=digits.target)
            started = time.perf_counter()
            learned = model.learn(f"task{task + 1}", file, epochs=(options.epochs, options.epochs))
            seconds = time.perf_counter() - started
            network = model.model.network
            head = sum(t.numel() for n, t in network.tasks[learned.name].private.items() if n.startswith("head."))
            used = min(round(network.layout.size * DENSITY * (task + 1)), network.layout.size)
            rows.append({
                "task": task + 1, "seconds": seconds, "accuracy": learned.accuracy, "free": model.model.free,
                "on_disk": sum(f.stat().st_size for f in model.path.rglob("*") if f.is_file()),
                "formula": (32 * used + network.layout.size * (task + 1)) // 8 + 4 * head * (task + 1),
                "dense": 4 * (network.layout.size + head) * (task + 1),
            })  # fmt: skip
        started = time.perf_counter()
        report = model.verify()
        verified = time.perf_counter() - started
        weights = network.layout.size
    early, late = ([row["seconds"] for row in part] for part in (rows[5:25], rows[-20:]))
    ratio = statistics.median(late) / statistics.median(early)
    print(f"{options.tasks} tasks, {weights:,} weights at density {DENSITY}, {device_name('cpu')}")
    print("| tasks | seconds a task | held-out accuracy % | free % | on disk kB | paper's formula kB | dense kB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        if row["task"] in SHOWN or row["task"] == options.tasks:
            size = " | ".join(f"{row[name] / 1000:.0f}" for name in ("on_disk", "formula", "dense"))
            print(
                f"| {row['task']} | {row['seconds']:.2f} | {row['accuracy']:.1f} | {100 * row['free']:.1f} | {size} |"
            )
    print(f"time per task, the last 20 / tasks 6 to 25, medians: {ratio:.3f}")
    print(f"verified {len(report.tasks.digests)} tasks and {report.files} files in {verified:.1f} s")
    if options.json:
        facts = {"rows": rows, "ratio": ratio, "verified": report.verified, "verify_seconds": verified,
                 "weights": weights, "versions": versions(), "device": device_name("cpu")}  # fmt: skip
        options.json.write_text(json.dumps(facts) + "\n")
    if options.figure:
        draw(options.figure, rows)


def draw(file: Path, rows: list[dict]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    tasks = [row["task"] for row in rows]
    above.plot(tasks, [row["seconds"] for row in rows], ".", color="#3b6ea5")
    above.set(ylabel="seconds a task", ylim=(0, None))
    for name, label, colour in (("dense", "a dense network per task", "#999999"),
                                ("formula", "the paper's formula", "#c0504d"),
                                ("on_disk", "the directory on disk", "#3b6ea5")):  # fmt: skip
        below.plot(tasks, [row[name] / 1e6 for row in rows], label=label, color=colour)
    below.set(xlabel="tasks", ylabel="MB", ylim=(0, None))
    below.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


if __name__ == "__main__":
    with one_line_errors():
        main()
