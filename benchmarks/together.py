"""Time of a training step when several runs share one GPU, each captured, with its own stream and thread.

    python benchmarks/together.py [--json FILE]
    CUDA_DEVICE_MAX_CONNECTIONS=8 python benchmarks/together.py     # CUDA's default instead of 32

Steps train a mask, as in runs on a GPU. Times are medians over rounds; the numbers of runs alternate in every round.
Between two epochs a run waits for the GPU lock, as in real runs.
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
from exssnet.data import TensorData
from exssnet.engine.cuda.gpu_lock import CONNECTIONS, ask_for_connections, taking_turns
from exssnet.experiments.run import device_name, versions
from exssnet.experiments.together import MOST
from step import cudnn, images, parse, steps_of


class Run:
    """The steps of a run, and the stream that replays them."""

    def __init__(self, options: argparse.Namespace, data: TensorData) -> None:
        self.order, self.lr = torch.arange(len(data), device="cuda"), options.lr
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self.steps = steps_of("mask", options, data)
        self.epoch()  # captures

    def epoch(self, times: int = 1) -> None:
        with taking_turns(), torch.cuda.stream(self.stream):
            for _ in range(times):
                self.steps.epoch(self.order, self.lr, 0, lambda share: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="1,2,4,8,12", help="comma-separated numbers of concurrent runs")
    parser.add_argument("--steps", type=int, default=157, help="steps per epoch")
    parser.add_argument("--epochs", type=int, default=5, help="epochs per run and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    ask_for_connections()
    options = parse(parser)
    if options.device != "cuda" or options.single:
        parser.error("needs a CUDA device, and captured steps")
    numbers = [int(number) for number in options.runs.split(",")]
    if max(numbers) > MOST:
        parser.error(f"at most {MOST} runs together")
    with cudnn(options):
        measure(options, numbers)


def measure(options: argparse.Namespace, numbers: list[int]) -> None:
    data = images(options.network, "cuda", options.steps * options.batch_size)
    runs = [Run(options, data) for _ in range(max(numbers))]
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(options.rounds):
        for number in numbers:
            with ThreadPoolExecutor(number) as pool:
                started = time.perf_counter()
                list(pool.map(lambda run: run.epoch(options.epochs), runs[:number]))
                seconds = time.perf_counter() - started
            times[number].append(1000 * seconds / (options.epochs * options.steps * number))

    print(f"{options.network}, batch {options.batch_size}, {options.precision}, mask training, {device_name('cuda')}")
    alone = statistics.median(times[numbers[0]])
    rows = []
    for number, values in times.items():
        middle = statistics.median(values)
        rows.append({"runs": number, "ms_a_step_and_run": middle, "lowest": min(values), "highest": max(values),
                     "times_as_fast": alone / middle})  # fmt: skip
        print(f"{number:3} together  {middle:.3f} ms per step and run ({min(values):.3f} to {max(values):.3f}), "
              f"{alone / middle:.2f} × the steps per second")  # fmt: skip
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        settings["connections"] = os.environ[CONNECTIONS]
        record = {"options": settings, "rows": rows, "versions": versions(), "device": device_name("cuda")}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
