"""Asking a model directory: a batch of several tasks, changing between tasks, opening a thousand of them.

    python benchmarks/store.py --json results/performance/store.json

1. 64 rows over 16 tasks of LeNet-300-100, in one call with a task per row, against one call per task; both through
   `StoredModel.predict`, in turns, with everything cached.
2. ResNet-18 of width 20: a call for a task that another one was asked between, against a call for the same task again;
   the difference is what changing costs.
3. Opening a directory of so many tasks and listing them, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from exssnet import Model
from exssnet.experiments.run import device_name, versions

OPEN = """
import sys, time
import exssnet.store.model
started = time.perf_counter()
model = exssnet.store.model.StoredModel.open(sys.argv[1])
count = len(model.tasks)
print(count, time.perf_counter() - started)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--tasks", type=int, default=1000, help="of the directory that is opened")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = mixed(Path(place, "mixed"), options.rounds)
        found |= switching(Path(place, "switching"), options.rounds)
        found |= opening(Path(place, "many"), options.tasks)
    print(
        f"64 rows over 16 tasks: {found['one_by_one_ms']:.2f} ms task by task, {found['mixed_ms']:.2f} ms in one call, "
        f"{found['mixed_ratio']:.2f} × faster ({found['mixed_low']:.2f} to {found['mixed_high']:.2f})"
    )
    print(
        f"ResNet-18 width 20, one image: {found['same_ms']:.2f} ms for the same task, {found['other_ms']:.2f} ms for "
        f"another; changing costs {found['switch_ms']:.3f} ms, the first time {found['first_ms']:.1f} ms"
    )
    print(f"opening and listing {found['tasks']} tasks ({found['many_bytes'] / 1e6:.1f} MB): {found['open_s']:.3f} s")
    if options.json:
        facts = found | {"versions": versions(), "device": device_name("cpu")}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def filled(path: Path, network: str, shape: tuple[int, ...], tasks: int, **options: object) -> tuple:
    draw = torch.Generator().manual_seed(0)
    model = Model.create(path, network, input=shape, method="supsup", **options)
    x, y = torch.rand(16, *shape, generator=draw), torch.arange(16) % 2
    for task in range(tasks):
        model.learn(f"task{task}", (x, y), epochs=(1, 0), held_out=0, batch_size=16)
    return model, draw


def mixed(path: Path, rounds: int) -> dict[str, float]:
    model, draw = filled(path, "lenet-300-100", (1, 28, 28), 16)
    x, tasks = torch.rand(64, 1, 28, 28, generator=draw), [f"task{row % 16}" for row in range(64)]
    apart = [(x[task::16], f"task{task}") for task in range(16)]
    assert torch.equal(model.predict(x, tasks=tasks)[::16], model.predict(x[::16], "task0"))
    times: dict[str, list[float]] = {"one": [], "mixed": []}
    for _ in range(rounds):
        times["one"].append(timed(lambda: [model.predict(rows, task) for rows, task in apart]))
        times["mixed"].append(timed(lambda: model.predict(x, tasks=tasks)))
    ratios = sorted(one / mixed for one, mixed in zip(times["one"], times["mixed"], strict=True))
    return {
        "one_by_one_ms": 1000 * statistics.median(times["one"]), "mixed_ms": 1000 * statistics.median(times["mixed"]),
        "mixed_ratio": statistics.median(ratios), "mixed_low": ratios[0], "mixed_high": ratios[-1],
    }  # fmt: skip


def switching(path: Path, rounds: int) -> dict[str, float]:
    model, draw = filled(path, "resnet18", (3, 32, 32), 2)
    x = torch.rand(1, 3, 32, 32, generator=draw)
    model = Model.open(path)
    assert len(model.model.tasks) == 2  # read now, and not in the first call
    first = timed(lambda: model.predict(x, "task0"))
    model.predict(x, "task1")
    same, other = [], []
    for turn in range(2 * rounds):
        model.predict(x, "task1" if turn % 2 else "task0")
        other.append(timed(lambda task="task0" if turn % 2 else "task1": model.predict(x, task)))
        same.append(timed(lambda task="task0" if turn % 2 else "task1": model.predict(x, task)))
    gaps = [b - a for a, b in zip(same, other, strict=True)]
    return {
        "same_ms": 1000 * statistics.median(same), "other_ms": 1000 * statistics.median(other),
        "switch_ms": 1000 * statistics.median(gaps), "first_ms": 1000 * first,
    }  # fmt: skip


def opening(path: Path, tasks: int) -> dict[str, float]:
    model, _ = filled(path, "lenet-300-100", (64,), tasks, width=0.2)
    size = sum(file.stat().st_size for file in path.rglob("*"))
    found = [subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True)
             .stdout.split() for _ in range(5)]  # fmt: skip
    assert {int(count) for count, _ in found} == {tasks}
    assert model.verify().verified
    return {"tasks": tasks, "open_s": statistics.median(float(seconds) for _, seconds in found), "many_bytes": size}


def timed(what: object) -> float:
    started = time.perf_counter()
    what()  # type: ignore[operator]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
