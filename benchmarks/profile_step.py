"""Where a captured step's time goes: kernels of a replayed graph by total time, and how much of the step they fill."""

from __future__ import annotations

import argparse

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from step import KINDS, SHAPES, images, steps_of


def busy_time(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """How long at least one of the intervals lasts, and from the first start to the last end."""
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - min(intervals)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet18", choices=SHAPES)
    parser.add_argument("--kind", default="mask", choices=KINDS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--multiple", type=int, default=1)
    parser.add_argument("--narrow", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--search", action="store_true", help="let cuDNN search for its fastest algorithms")
    parser.add_argument("--rows", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    options.device, options.steps = "cuda", 20
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = options.search, not options.search
    data = images(options.network, "cuda", options.steps * options.batch_size)
    steps = steps_of(options.kind, options, data, options.compile, graph=True)
    order = torch.arange(options.steps * options.batch_size, device="cuda")
    for _ in range(3):
        steps.epoch(order, 0.001, 0, lambda share: None)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps.epoch(order, 0.001, 0, lambda share: None)
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    total = sum(event.device_time_total for event in events) / options.steps
    launches = sum(event.count for event in events) / options.steps
    busy, span = busy_time([(event.time_range.start, event.time_range.end) for event in profiler.events()
                            if event.device_type == DeviceType.CUDA])  # fmt: skip
    print(f"{launches:.0f} kernels a step, {total / 1000:.3f} ms of kernel time")
    milliseconds = 1000 * options.steps
    print(f"a step takes {span / milliseconds:.3f} ms, of which something runs {busy / milliseconds:.3f} ms")
    for event in sorted(events, key=lambda e: -e.device_time_total)[: options.rows]:
        print(
            f"{event.device_time_total / options.steps:8.1f} µs {event.count / options.steps:6.1f} ×  {event.key[:110]}"
        )


if __name__ == "__main__":
    main()
