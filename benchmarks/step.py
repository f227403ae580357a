"""What a training step costs: masked against dense, in the same engine, interleaved in one process.

    python benchmarks/step.py --device cuda --network resnet18 --precision bf16 --channels-last --compile

Each variant trains on random images, too many to learn by heart: then gradients would vanish and averages of them
become numbers too small for the hardware to be fast with. The variants take turns in every round of steps; times are
medians over the rounds, and so is the ratio to the dense step of the same round. A dense step trains all weights of the
same network through the same loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from exssnet.core.execution import Execution
from exssnet.core.subnetwork import ScoredSubnetwork, Subnetwork, WeightSubnetwork
from exssnet.data import HorizontalFlip, Normalize, Pipeline, RandomCrop, TensorData
from exssnet.data.tensors import Shared
from exssnet.experiments.run import device_name, versions
from exssnet.methods.base import Phase
from exssnet.methods.supsup import MaskSettings, SupSup
from exssnet.models import build
from exssnet.train.optimizers import optimizer_factory
from exssnet.train.steps import GraphSteps, Steps

SHAPES = {"resnet18": ((3, 32, 32), 20), "lenet-300-100": ((1, 28, 28), 2)}
KINDS = ("dense", "mask", "weights")
IMAGES = 50_000


class DenseSubnetwork(Subnetwork):
    """All weights of the network, trained."""

    def __init__(self, scored: ScoredSubnetwork) -> None:
        super().__init__(scored.network, scored.task, scored.classes, scored.own)
        self.weights = scored.network.arrangement(scored.network.weights).clone().requires_grad_()

    def arranged(self) -> torch.Tensor:
        return self.weights

    def mask(self) -> torch.Tensor:
        return torch.ones_like(self.weights, dtype=torch.bool)

    def _learned(self) -> torch.Tensor:
        return self.weights


def images(network: str, device: str, count: int) -> TensorData:
    shape, classes = SHAPES[network]
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, classes, (count,), generator=draw)
    augment = (RandomCrop(4), HorizontalFlip()) if network == "resnet18" else ()
    pipeline = Pipeline((*augment, Normalize.unit()))
    return TensorData(Shared(pixels), torch.arange(count), labels, classes, pipeline).to(device)


def steps_of(kind: str, options: argparse.Namespace, data: TensorData, compiled: bool, graph: bool) -> Steps:
    shape, classes = SHAPES[options.network]
    method = SupSup(build(options.network, shape, classes), MaskSettings(), seed=0)
    method.to(options.device)
    low = torch.bfloat16 if options.precision == "bf16" else None
    batch = options.batch_size if compiled else 0
    execution = Execution(low, options.channels_last, options.multiple, options.narrow, batch)
    method.network.execute(execution)
    scored = ScoredSubnetwork(method.network, "task", classes)
    method.subnetwork = scored
    if kind == "dense":
        method.subnetwork = DenseSubnetwork(scored)
    elif kind == "weights":
        method.subnetwork = WeightSubnetwork(scored, torch.ones_like(method.network.bank.used))
    phase = Phase(kind, method.subnetwork.parameters(), 1, 0.001)
    optimizer = optimizer_factory("adam")(phase.parameters, phase.lr)
    return (GraphSteps if graph else Steps)(method, data, phase, optimizer, options.batch_size)


def variants(options: argparse.Namespace) -> Iterator[tuple[str, Steps]]:
    data = images(options.network, options.device, IMAGES)
    for compiled in (False, True) if options.compile else (False,):
        for graph in (False, True) if options.device == "cuda" else (False,):
            for kind in KINDS:
                name = kind + (" compiled" if compiled else "") + (" graph" if graph else "")
                if options.only in name:
                    steps = steps_of(kind, options, data, compiled, graph)
                    steps.sizes = steps.sizes[: options.steps]  # a round is a part of an epoch
                    yield name, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="resnet18", choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50, help="steps a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--multiple", type=int, default=1, help="fill channels up to a multiple of this")
    parser.add_argument(
        "--narrow", type=int, default=0, help="our kernels for convolutions of at most so many channels"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--no-search", action="store_true", help="take cuDNN's first choice of algorithms")
    parser.add_argument("--deterministic", action="store_true", help="only algorithms that always give the same bits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = not options.no_search
    torch.backends.cudnn.deterministic = options.deterministic

    found = dict(variants(options))
    times: dict[str, list[float]] = {name: [] for name in found}
    first: dict[str, float] = {}
    for number in range(options.rounds + 1):
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(number)).to(options.device)
        for name, steps in found.items():
            started = time.perf_counter()
            steps.epoch(order, 0.001, 0, lambda share: None)  # ends with a look at the loss: synchronised
            seconds = time.perf_counter() - started
            if name not in first:
                first[name] = seconds  # capture, compilation
            else:
                times[name].append(1000 * seconds / options.steps)

    heading = f"{options.network}, batch {options.batch_size}, {options.precision}"
    print(
        f"{heading}, channels_last {options.channels_last}, multiple {options.multiple}, {device_name(options.device)}"
    )
    rows = []
    for name, values in times.items():
        milliseconds = statistics.median(values)
        dense = times.get(" ".join(["dense", *name.split()[1:]]))
        ratio = statistics.median(a / b for a, b in zip(values, dense, strict=True)) if dense else None
        rows.append({"variant": name, "ms": milliseconds, "lowest": min(values), "highest": max(values),
                     "first_round_s": first[name], "over_dense": ratio})  # fmt: skip
        shown = "–" if ratio is None else f"{ratio:.3f}"
        print(f"{name:24} {milliseconds:8.3f} ms ({min(values):.3f} to {max(values):.3f})  {shown} × dense"
              f"   first round {first[name]:.1f} s", flush=True)  # fmt: skip
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        record = {"options": settings, "rows": rows, "versions": versions(), "device": device_name(options.device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
