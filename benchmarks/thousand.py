"""A thousand tasks: time per task and memory must stay flat.

    EXSSNET_DATA=... python benchmarks/thousand.py --json studies/performance/thousand.json --figure docs/thousand.svg

Permuted MNIST in miniature: 100 training images per class, one epoch per phase, half the width. Time is from the end of
one task to the end of the next, with evaluation, digests and log; memory is the process's resident set after the
allocator has released free memory (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from pathlib import Path

from exssnet.cli.console import one_line_errors
from exssnet.experiments.config import resolve
from exssnet.experiments.run import run
from exssnet.train import Listener

PAGE = 4096


def resident() -> int:
    """Bytes in use: the resident set after the allocator has released free memory."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return PAGE * int(Path("/proc/self/statm").read_text().split()[1])


class Watch(Listener):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self._last = time.perf_counter()

    def task_ended(self, name: str, accuracies: list[float]) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self.bytes.append(resident())
        self._last = now


def draw(file: Path, seconds: list[float], resident: list[int], weights: int) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    tasks = range(1, len(seconds) + 1)
    above.plot(tasks, [1000 * s for s in seconds], ".", markersize=2, color="#3b6ea5")
    above.set(ylabel="milliseconds a task", ylim=(0, 3000 * statistics.median(seconds)))
    grown = [(size - resident[9]) / 2**20 for size in resident]
    below.plot(tasks, grown, color="#3b6ea5", label="resident memory since task 10")
    below.plot(tasks, [(task - 10) * weights / 8 / 2**20 for task in tasks], "--", color="#c0504d",
               label="1 bit per weight and task")  # fmt: skip
    below.set(xlabel="task", ylabel="MiB", ylim=(-2, None))
    below.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    config = resolve("permuted-mnist", "exssnet", 0, tasks=options.tasks, samples_per_class=100, mask_epochs=1,
                     weight_epochs=1, width=0.5, evaluate="ends", density=0.05, device="cpu")  # fmt: skip
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        record = run(config, Path(folder), watch, checkpoint_seconds=1e9)
    watch.seconds.pop(), watch.bytes.pop()  # the last task evaluates all tasks
    early, late = watch.seconds[9:109], watch.seconds[-100:]
    weights = record["storage"]["mask_bits"] // options.tasks
    grown = (watch.bytes[-1] - watch.bytes[9]) / (len(watch.bytes) - 10)
    print(f"{options.tasks} tasks, {weights:,} weights, {record['device']}, a miniature of permuted MNIST")
    print(f"time per task: {1000 * statistics.median(early):.1f} ms over tasks 10 to 109, "
          f"{1000 * statistics.median(late):.1f} ms over the last 100, "
          f"ratio {statistics.median(late) / statistics.median(early):.3f}")  # fmt: skip
    print(f"memory per task: {grown:,.0f} bytes; 1 bit per weight is {weights / 8:,.0f}")
    print(f"average accuracy {record['average_accuracy']:.2f} % (miniature), forgetting {record['forgetting']}, "
          f"verified {record['zero_forgetting']['verified']}")  # fmt: skip
    if options.json:
        of_the_run = ("device", "versions", "config", "forgetting", "average_accuracy")
        facts = {"seconds": watch.seconds, "resident_bytes": watch.bytes, "weights": weights}
        facts |= {name: record[name] for name in of_the_run}
        options.json.write_text(json.dumps(facts) + "\n")
    if options.figure:
        draw(options.figure, watch.seconds, watch.bytes, weights)


if __name__ == "__main__":
    with one_line_errors():
        main()
