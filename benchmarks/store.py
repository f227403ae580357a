"""Predictions of a model directory: a batch of several tasks, changing between tasks, opening a thousand of them.

    python benchmarks/store.py --json studies/performance/store.json

1. 64 rows over 16 tasks of LeNet-300-100, in one call with a task per row, against one call per task; both through
   `StoredModel.predict`, alternating, with everything cached.
2. The same of ResNet-18 of width 20, which `Stacked` computes task by task: what stacked weights would give, with four
   rows of every task and with a random task for every row.
3. ResNet-18 of width 20: a call for another task than the last call's, against a call for the same task; the
   difference is what changing costs.
4. Opening a directory of N tasks and listing them, or predicting with its last task, in a process of its own.
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
from exssnet.cli.console import one_line_errors
from exssnet.core.engine import Engine
from exssnet.engine.stacked import Stacked
from exssnet.experiments.environment import device_name, versions

OPEN = """
import sys, time
import torch
import exssnet.store.stored_model
torch.set_num_threads(1)
path, last = sys.argv[1], int(sys.argv[2]) - 1
started = time.perf_counter()
model = exssnet.store.stored_model.StoredModel.open(path)
WHAT
print(time.perf_counter() - started)
"""
LIST = OPEN.replace("WHAT", "assert len(model.tasks) == last + 1")
ASK = OPEN.replace("WHAT", "model.predict(torch.zeros(1, 64), f'task{last}')")  # reads the masks of all tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--tasks", type=int, default=1000, help="of the directory that is opened")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = mixed(Path(place, "mixed"), options.rounds)
        found |= convolutions(Path(place, "convolutions"), options.rounds)
        found |= switching(Path(place, "switching"), options.rounds)
        found |= opening(Path(place, "many"), options.tasks)
    print(
        f"64 rows over 16 tasks: {found['one_by_one_ms']:.2f} ms task by task, {found['mixed_ms']:.2f} ms in one call, "
        f"{spread(found, 'mixed')}"
    )
    print(
        f"the same, ResNet-18 width 20: {found['even_one_by_one_ms']:.0f} ms task by task; "
        f"at once {spread(found, 'even_at_once')}, with a random task for every row {spread(found, 'random_at_once')}"
    )
    print(
        f"ResNet-18 width 20, one image: {found['same_ms']:.2f} ms for the same task, {found['other_ms']:.2f} ms for "
        f"another; changing costs {found['switch_ms']:.3f} ms, the first time {found['first_ms']:.1f} ms"
    )
    print(
        f"opening and listing {found['tasks']} tasks ({found['many_bytes'] / 1e6:.1f} MB): {found['open_s']:.3f} s; "
        f"opening and asking the last one: {found['ask_s']:.3f} s ({found['ask_low']:.3f} to {found['ask_high']:.3f})"
    )
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
    by_task = [(x[task::16], f"task{task}") for task in range(16)]
    assert torch.equal(model.predict(x, tasks=tasks)[::16], model.predict(x[::16], "task0"))
    times: dict[str, list[float]] = {"one": [], "mixed": []}
    for _ in range(rounds):
        times["one"].append(timed(lambda: [model.predict(rows, task) for rows, task in by_task]))
        times["mixed"].append(timed(lambda: model.predict(x, tasks=tasks)))
    found = {"one_by_one_ms": 1000 * statistics.median(times["one"])}
    return found | against("mixed", times["one"], times["mixed"])


def convolutions(path: Path, rounds: int) -> dict[str, float]:
    _, draw = filled(path, "resnet18", (3, 32, 32), 16)
    usual, plain = (Model.open(path).model.network for _ in range(2))  # convolutions are channels-last, and are not
    plain.use(Engine())
    ways = {"one_by_one": Stacked(usual), "at_once": Stacked(plain)}
    ways["at_once"]._stackable = True  # as if it had no convolutions
    x = torch.rand(64, 3, 32, 32, generator=draw)
    logits = [way.logits({f"task{task}": x[task::16] for task in range(16)}) for way in ways.values()]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    found = {}
    for kind in ("even", "random"):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            whose = torch.arange(64) % 16 if kind == "even" else torch.randint(16, (64,), generator=draw)
            rows = {f"task{task}": (whose == task).nonzero().view(-1).tolist() for task in whose.unique()}
            for name, way in ways.items():
                way.classes(x, rows)  # what it caches
                times[name].append(timed(lambda way=way, rows=rows: way.classes(x, rows)))
        found[f"{kind}_one_by_one_ms"] = 1000 * statistics.median(times["one_by_one"])
        found |= against(f"{kind}_at_once", times["one_by_one"], times["at_once"])
    assert ways["at_once"]._stackable  # it never gave up
    return found


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
    times: dict[str, list[float]] = {LIST: [], ASK: []}
    for _ in range(5):
        for program, seconds in times.items():
            command = [sys.executable, "-c", program, str(path), str(tasks)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds.append(float(done.stdout))
    assert model.verify().verified
    return {
        "tasks": tasks, "many_bytes": size, "open_s": statistics.median(times[LIST]),
        "ask_s": statistics.median(times[ASK]), "ask_low": min(times[ASK]), "ask_high": max(times[ASK]),
    }  # fmt: skip


def against(name: str, usual: list[float], other: list[float]) -> dict[str, float]:
    """How many times faster the other way is, by rounds."""
    ratios = sorted(a / b for a, b in zip(usual, other, strict=True))
    return {
        f"{name}_ms": 1000 * statistics.median(other), f"{name}_ratio": statistics.median(ratios),
        f"{name}_low": ratios[0], f"{name}_high": ratios[-1],
    }  # fmt: skip


def spread(found: dict[str, float], name: str) -> str:
    return f"{found[name + '_ratio']:.2f} × as fast ({found[name + '_low']:.2f} to {found[name + '_high']:.2f})"


def timed(what: object) -> float:
    started = time.perf_counter()
    what()  # type: ignore[operator]
    return time.perf_counter() - started


if __name__ == "__main__":
    with one_line_errors():
        main()
