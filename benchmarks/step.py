"""Time of a masked training step compared with a dense one, in the same engine, alternating in one process.

    python benchmarks/step.py                                             # on a GPU, as in runs
    python benchmarks/step.py --way cudnn                                 # with cuDNN's convolutions
    python benchmarks/step.py --way plain --single                        # single operations, in fp32
    python benchmarks/step.py --device cpu --network lenet-300-100

On a CPU the time of a step depends on the data: masks change, gradients vanish, and their averages become denormal
numbers, which are slow. So LeNet learns the ten digits of MNIST; on random images and labels its units die. Units of a
network with batch norm do not, and ResNet-18 gets random images, too many to memorize. The variants alternate in every
round of steps; times, and ratios to the dense steps of the same round, are medians over rounds. A dense step trains all
weights of the same network in the same loop: as one vector, as the dense methods do, or, on a CPU, as one tensor per
layer, which saves concatenating the gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from exssnet.cli.console import one_line_errors
from exssnet.core.subnetwork import ScoredSubnetwork, Subnetwork, WeightSubnetwork
from exssnet.data import HorizontalFlip, Normalize, Pipeline, RandomCrop, TensorData, load
from exssnet.data.tensors import Shared
from exssnet.engine.execution import CPU, CUDA, PLAIN, Execution
from exssnet.errors import DataError
from exssnet.experiments.run import device_name, versions
from exssnet.methods.base import Phase
from exssnet.methods.masks.supsup import MaskSettings, SupSup
from exssnet.models import build
from exssnet.train.optimizers import optimizer_factory
from exssnet.train.steps import GraphSteps, Steps

SHAPES = {"resnet18": ((3, 32, 32), 20), "lenet-300-100": ((1, 28, 28), 10)}
DENSE = {"cpu": ("dense", "by layer"), "cuda": ("dense",)}
MASKED = ("mask", "weights")
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


class ByLayer(DenseSubnetwork):
    """All weights of the network, trained as one tensor per layer."""

    def __init__(self, scored: ScoredSubnetwork) -> None:
        super().__init__(scored)
        layers = scored.network.layers(self.weights.detach())
        self._layers = {name: layer.clone().requires_grad_() for name, layer in layers.items()}

    def layers(self) -> dict[str, torch.Tensor]:
        return self._layers

    def parameters(self) -> list[torch.Tensor]:
        return [*self._layers.values(), *super().parameters()[1:]]


def images(network: str, device: str, count: int) -> TensorData:
    """Images of MNIST for LeNet, random ones for ResNet-18."""
    if network == "lenet-300-100":
        try:
            digits = load("mnist").train
        except DataError as error:
            raise SystemExit(f"error: {error}") from None
        rows = torch.arange(count)
        return digits.select(rows, digits.labels[rows], 10).to(device)
    shape, classes = SHAPES[network]
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, classes, (count,), generator=draw)
    pipeline = Pipeline((RandomCrop(4), HorizontalFlip(), Normalize.unit()))
    return TensorData(Shared(pixels), torch.arange(count), labels, classes, pipeline).to(device)


def execution(options: argparse.Namespace) -> Execution:
    if options.device == "cpu":
        return PLAIN if options.way == "plain" else CPU
    way = {"runs": CUDA, "cudnn": replace(CUDA, narrow=0), "plain": PLAIN}[options.way]
    low = torch.bfloat16 if options.precision == "bf16" else None
    batch = options.batch_size if options.compile else 0
    return replace(way, autocast=low, compiled_batch=batch, structure=options.network)  # compiled once for all variants


def cudnn(options: argparse.Namespace) -> AbstractContextManager[None]:
    """cuDNN's flags as in runs, or with its search."""
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=options.search, deterministic=not options.search, allow_tf32=False
    )


def steps_of(kind: str, options: argparse.Namespace, data: TensorData) -> Steps:
    shape, classes = SHAPES[options.network]
    method = SupSup(build(options.network, shape, classes), MaskSettings(), seed=0)
    method.to(options.device)
    method.network.execute(execution(options))
    scored = ScoredSubnetwork(method.network, "task", classes)
    method.subnetwork = scored
    if kind == "dense":
        method.subnetwork = DenseSubnetwork(scored)
    elif kind == "by layer":
        method.subnetwork = ByLayer(scored)
    elif kind == "weights":
        method.subnetwork = WeightSubnetwork(scored, torch.ones_like(method.network.bank.used))
    phase = Phase(kind, method.subnetwork.parameters(), 1, options.lr)
    optimizer = optimizer_factory("adam")(phase.parameters, phase.lr)
    captured = options.device == "cuda" and not options.single
    return (GraphSteps if captured else Steps)(method, data, phase, optimizer, options.batch_size)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options of this program and of those that use its steps."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--network", default="resnet18", choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--way", default="runs", choices=["runs", "cudnn", "plain"])
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="bf16 on a GPU unless the way is plain")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--single", action="store_true", help="do not capture the step as a graph")
    parser.add_argument("--search", action="store_true", help="search of cuDNN for its fastest kernels")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.device == "cpu" and (options.way == "cudnn" or options.precision == "bf16" or options.search):
        parser.error("cuDNN and bf16 need a CUDA device")
    fast = options.device == "cuda" and options.way != "plain"
    options.precision = options.precision or ("bf16" if fast else "fp32")
    options.compile = fast and not options.no_compile
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="steps per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parse(parser)
    torch.set_num_threads(options.threads)
    with cudnn(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    data = images(options.network, options.device, IMAGES)
    dense = DENSE[options.device]
    found = {kind: steps_of(kind, options, data) for kind in (*dense, *MASKED)}
    times: dict[str, list[float]] = {name: [] for name in found}
    first: dict[str, float] = {}
    for number in range(options.rounds + 1):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(number)).to(options.device)
        for name, steps in found.items():
            steps.sizes = steps.sizes[: options.steps]  # a round is a part of an epoch
            started = time.perf_counter()
            steps.epoch(order, options.lr, 0, lambda share: None)  # reading the loss synchronizes
            seconds = time.perf_counter() - started
            if name not in first:
                first[name] = seconds  # capture, compilation
            else:
                times[name].append(1000 * seconds / options.steps)

    compiled = ", compiled" if options.compile else ""
    print(
        f"{options.network}, batch {options.batch_size}, {options.precision}, way {options.way}{compiled}, "
        f"{device_name(options.device)}"
    )
    rows = []
    for name, values in times.items():
        ratios, said = {}, []
        for other in dense:
            over, key = sorted(a / b for a, b in zip(values, times[other], strict=True)), other.replace(" ", "_")
            ratios[f"over_{key}"] = statistics.median(over)
            ratios[f"over_{key}_80"] = [over[round(s * (len(over) - 1))] for s in (0.1, 0.9)]  # of 80 % of the rounds
            said.append(f"{ratios[f'over_{key}']:.3f} × {other}")
        milliseconds = statistics.median(values)
        rows.append({"variant": name, "ms": milliseconds, "lowest": min(values), "highest": max(values),
                     "first_round_s": first[name], **ratios})  # fmt: skip
        print(f"{name:8} {milliseconds:8.3f} ms ({min(values):.3f} to {max(values):.3f})  {', '.join(said)}"
              f"   first round {first[name]:.1f} s", flush=True)  # fmt: skip
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        record = {"options": settings, "rows": rows, "versions": versions(), "device": device_name(options.device)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
