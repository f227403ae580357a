"""What a training step costs when several runs share one GPU, each captured, on a stream and in a thread of its own.

    python benchmarks/together.py [--json FILE]
    CUDA_DEVICE_MAX_CONNECTIONS=8 python benchmarks/together.py     # CUDA's default instead of ours

A step finds a mask, computed as runs on a GPU compute it; the runs share an engine. Times are medians over rounds, and
every round measures each number of runs. Between two epochs a run waits for the GPU lock, as `exssnet run` does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from exssnet.cli.console import one_line_errors
from exssnet.core.engine import Engine
from exssnet.data import TensorData
from exssnet.engine.cuda.sharing import CONNECTIONS, ask_for_connections, holding_gpu
from exssnet.experiments.environment import device_name, versions
from exssnet.experiments.together import MOST
from step import cudnn, engine_of, images, parse, steps_of


class Run:
    """A run's steps, and the stream they are replayed on."""

    def __init__(self, options: argparse.Namespace, data: TensorData, engine: Engine) -> None:
        self.order, self.lr = torch.arange(len(data), device="cuda"), options.lr
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self.steps = steps_of("mask", options, data, engine)
        self.epoch()  # captures

    def epoch(self, times: int = 1) -> None:
        with holding_gpu(), torch.cuda.stream(self.stream):
            for _ in range(times):
                self.steps.epoch(self.order, self.lr, 0, lambda share: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="1,2,4,8,12", help="numbers of runs at a time")
    parser.add_argument("--steps", type=int, default=157, help="an epoch")
    parser.add_argument("--epochs", type=int, default=5, help="of each run, a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    ask_for_connections()
    options = parse(parser)
    if options.device != "cuda" or options.engine != "fast":
        parser.error("needs a CUDA device, and its engine")
    numbers = [int(number) for number in options.runs.split(",")]
    if max(numbers) > MOST:
        parser.error(f"at most {MOST} runs at a time")
    with cudnn(options):
        measure(options, numbers)


def measure(options: argparse.Namespace, numbers: list[int]) -> None:
    data = images(options.network, "cuda", options.steps * options.batch_size)
    engine = engine_of(options)
    runs = [Run(options, data, engine) for _ in range(max(numbers))]
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(options.rounds):
        for number in numbers:
            with ThreadPoolExecutor(number) as pool:
                started = time.perf_counter()
                list(pool.map(lambda run: run.epoch(options.epochs), runs[:number]))
                seconds = time.perf_counter() - started
            times[number].append(1000 * seconds / (options.epochs * options.steps * number))

    print(f"{options.network}, batch {options.batch_size}, {options.precision}, finding masks, {device_name('cuda')}")
    alone = statistics.median(times[numbers[0]])
    rows = []
    for number, values in times.items():
        middle = statistics.median(values)
        rows.append({"runs": number, "ms_a_step_and_run": middle, "lowest": min(values), "highest": max(values),
                     "times_as_fast": alone / middle})  # fmt: skip
        print(f"{number:3} at a time  {middle:.3f} ms a step and run ({min(values):.3f} to {max(values):.3f}), "
              f"{alone / middle:.2f} × the steps a second")  # fmt: skip
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        settings["connections"] = os.environ[CONNECTIONS]
        record = {"options": settings, "rows": rows, "versions": versions(), "device": device_name("cuda")}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
