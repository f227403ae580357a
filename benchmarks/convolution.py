"""What the convolutions of ResNet-18 (width 20, batch 64) cost: our kernels against cuDNN's, each in a captured graph.

    python benchmarks/convolution.py [--sweep] [--json FILE]

cuDNN gets bfloat16, channels-last tensors with channels padded to a multiple of 8, and takes its first deterministic
choice, as runs do. `--sweep` also tries other tiles for every shape and prints the best. Needs Triton and a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from exssnet.cli.console import one_line_errors
from exssnet.engine import has_triton
from exssnet.experiments.environment import device_name, versions

if has_triton():
    from exssnet.engine.cuda import convolution_kernels as ours
    from exssnet.engine.cuda.convolution_kernels import Tile

Shape = tuple[int, int, int, int, int]  # inputs, outputs, size of the image, kernel, stride
SHAPES: dict[Shape, int] = {  # and how often it occurs
    (3, 20, 32, 3, 1): 1,
    (20, 20, 32, 3, 1): 4,
    (20, 40, 32, 3, 2): 1,
    (20, 40, 32, 1, 2): 1,
    (40, 40, 16, 3, 1): 3,
    (40, 80, 16, 3, 2): 1,
    (40, 80, 16, 1, 2): 1,
    (80, 80, 8, 3, 1): 3,
    (80, 160, 8, 3, 2): 1,
    (80, 160, 8, 1, 2): 1,
    (160, 160, 4, 3, 1): 3,
}
KINDS = ("forward", "input", "weight")
PEAK_TFLOPS, PEAK_TBS = 790, 4.8  # of an H200: dense bfloat16 as measured on large products, and its memory


def call(kind: str, shape: Shape, batch: int, tile: Tile | None) -> Callable[[], Tensor]:
    inputs, outputs, size, kernel, stride = shape
    padding, small = kernel // 2, (size - 1) // stride + 1
    x, g, w = _low(batch, inputs, size, size), _low(batch, outputs, small, small), _low(outputs, inputs, kernel, kernel)
    if kind == "forward":
        return lambda: ours.forward(x, w, stride, padding, tile)
    if kind == "input":
        return lambda: ours.input_gradient(g, w, size, size, stride, padding, tile)
    return lambda: ours.weight_gradient(g, x, kernel, stride, padding, tile)


def cudnn(kind: str, shape: Shape, batch: int) -> Callable[[], object]:
    inputs, outputs, size, kernel, stride = shape
    inputs, outputs = -(-inputs // 8) * 8, -(-outputs // 8) * 8
    padding, small = kernel // 2, (size - 1) // stride + 1
    x, g, w = _low(batch, inputs, size, size), _low(batch, outputs, small, small), _low(outputs, inputs, kernel, kernel)
    if kind == "forward":
        return lambda: torch.conv2d(x, w, stride=stride, padding=padding)
    wanted = [kind == "input", kind == "weight", False]
    geometry = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    return lambda: torch.ops.aten.convolution_backward(g, x, w, None, *geometry, wanted)


def _low(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)


def microseconds(function: Callable[[], object], times: int = 20) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            function()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / (5 * times))
    return 1e6 * min(found)


def tiles(kind: str, shape: Shape, batch: int) -> list[Tile]:
    """Candidates for a sweep."""
    inputs, outputs, size, kernel, stride = shape
    rows = batch * ((size - 1) // stride + 1) ** 2
    channels, columns = (outputs, inputs) if kind == "input" else (inputs, outputs)
    deepest = max(16, 1 << (kernel * channels - 1).bit_length())
    wide = (32,) if columns <= 32 else (32, 64)
    if kind != "weight":
        return [
            Tile(tall, column, depth, warps, stages)
            for (tall, warps), column, depth, stages in product(
                ((64, 4), (128, 4), (128, 8)) if rows >= 16384 else ((32, 4), (64, 4)), wide, (16, 32, 64, 128), (2, 3)
            )
            if min(64, deepest) <= depth <= deepest
        ]
    return [
        Tile(tall, span, depth, 4, stages, parts)
        for tall, span, depth, stages in product(wide, (16, 32, 64, 128), (32, 64, 128), (2, 3))
        if min(64, deepest) <= span <= deepest
        for parts in (1, 4, 8, 16, 32, 64, 128)
        if rows // parts >= 2 * depth
    ]


def build_ahead(job: tuple[str, Shape, int, Tile]) -> None:
    """Compile in another process; the compiler keeps what it made on disk."""
    try:
        call(*job)()
    except Exception as error:  # a tile too large for the chip is no candidate
        print("left out:", job, type(error).__name__, flush=True)


def sweep(kind: str, shape: Shape, batch: int) -> tuple[Tile, float]:
    found = {}
    for tile in tiles(kind, shape, batch):
        try:
            found[tile] = microseconds(call(kind, shape, batch, tile))
        except Exception:
            continue
    best = min(found, key=lambda tile: found[tile])
    return best, found[best]


def roofline(batch: int) -> dict[str, float]:
    """What the convolutions of a step must compute and move at least, and how long an H200 would need for it."""
    flop, moved = 0.0, 0.0
    for (inputs, outputs, size, kernel, stride), often in SHAPES.items():
        small = (size - 1) // stride + 1
        kinds = 2 if inputs == 3 else 3
        flop += often * kinds * 2 * batch * small**2 * outputs * inputs * kernel**2
        tensors = batch * size**2 * inputs, batch * small**2 * outputs, outputs * inputs * kernel**2
        moved += often * kinds * 2 * sum(tensors)  # each kind reads two of them and writes the third, 2 bytes a number
    return {"gflop": flop / 1e9, "compute_us": flop / PEAK_TFLOPS / 1e6, "megabytes": moved / 1e6,
            "memory_us": moved / PEAK_TBS / 1e6}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not has_triton():
        parser.exit(2, "convolution.py: its kernels need Triton: pip install triton\n")
    if not torch.cuda.is_available():
        parser.exit(2, "convolution.py: needs a CUDA device\n")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    batch = options.batch_size
    if options.sweep:
        once = {(kind, shape, batch, tile._replace(parts=min(tile.parts, 4)))
                for shape in SHAPES for kind in KINDS for tile in tiles(kind, shape, batch)}  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            pool.map(build_ahead, sorted(once), chunksize=4)

    rows, sums = [], {"ours": 0.0, "cudnn": 0.0, "best": 0.0}
    print("in → out, image, kernel, stride   kind      ours µs   cuDNN µs   best tile")
    for (shape, often), kind in product(SHAPES.items(), KINDS):
        if kind == "input" and shape[0] == 3:
            continue  # nobody asks for the gradient of an image
        row = {"shape": shape, "kind": kind, "ours": microseconds(call(kind, shape, batch, None)),
               "cudnn": microseconds(cudnn(kind, shape, batch))}  # fmt: skip
        best = ""
        if options.sweep:
            tile, row["best"] = sweep(kind, shape, batch)
            row["tile"] = list(tile)
            best = f"{row['best']:6.1f} {tuple(tile)}"
        rows.append(row)
        for name in sums:
            sums[name] += often * row.get(name, 0.0)
        print(f"{shape!s:32} {kind:8} {row['ours']:9.1f} {row['cudnn']:10.1f}   {best}", flush=True)
    limits = roofline(batch)
    print("a step's convolutions, µs:", {name: round(value) for name, value in sums.items()})
    print(
        f"what the chip allows: {limits['gflop']:.1f} GFLOP, {limits['compute_us']:.0f} µs at {PEAK_TFLOPS} TFLOP/s; "
        f"{limits['megabytes']:.0f} MB in and out, {limits['memory_us']:.0f} µs at {PEAK_TBS} TB/s"
    )
    if options.json:
        record = {
            "batch_size": batch,
            "rows": rows,
            "sums": sums,
            "roofline": limits,
            "versions": versions(),
            "device": device_name("cuda"),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
