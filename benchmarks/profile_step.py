"""Profile of a captured step: kernels of a replayed graph by total time, and the fraction of the step they fill."""

from __future__ import annotations

import argparse

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from exssnet.cli.console import one_line_errors
from step import DENSE, MASKED, cudnn, engine_of, images, parse, steps_of

STEPS = 20


def busy_time(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Length of the union of intervals, and from the first start to the last end."""
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - min(intervals)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="mask", choices=[*DENSE["cuda"], *MASKED])
    parser.add_argument("--rows", type=int, default=30)
    options = parse(parser)
    if options.device != "cuda":
        parser.error("needs a CUDA device")
    with cudnn(options):
        data = images(options.network, "cuda", STEPS * options.batch_size)
        steps = steps_of(options.kind, options, data, engine_of(options))
        order = torch.arange(STEPS * options.batch_size, device="cuda")
        for _ in range(3):
            steps.epoch(order, options.lr, 0, lambda share: None)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps.epoch(order, options.lr, 0, lambda share: None)
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    total = sum(event.device_time_total for event in events) / STEPS
    launches = sum(event.count for event in events) / STEPS
    busy, span = busy_time([(event.time_range.start, event.time_range.end) for event in profiler.events()
                            if event.device_type == DeviceType.CUDA])  # fmt: skip
    print(f"{launches:.0f} kernels per step, {total / 1000:.3f} ms of kernel time")
    milliseconds = 1000 * STEPS
    print(f"a step takes {span / milliseconds:.3f} ms, kernels run for {busy / milliseconds:.3f} ms")
    for event in sorted(events, key=lambda e: -e.device_time_total)[: options.rows]:
        print(f"{event.device_time_total / STEPS:8.1f} µs {event.count / STEPS:6.1f} ×  {event.key[:110]}")


if __name__ == "__main__":
    with one_line_errors():
        main()
