"""What a training step costs: masked against dense, in the same engine, alternating in one process.

    python benchmarks/step.py                                             # on a GPU, as runs compute there
    python benchmarks/step.py --no-kernels                                # the same, without our own kernels
    python benchmarks/step.py --engine plain                              # operations one by one, in fp32
    python benchmarks/step.py --device cpu --network lenet-300-100

What a step costs on a CPU depends on what is learned: masks change, gradients vanish, averages of them become numbers
too small for the hardware to be fast with. So LeNet learns the ten digits of MNIST. On random images and labels its
units die; those of a network with batch norm do not, and ResNet-18 has such images, too many to learn by heart. Each
round measures every variant; times are medians over the rounds, and so are the ratios to the dense steps of the same
round. A dense step trains all weights of the same network through the same loop: as one vector, as our dense methods
have them, or, on a CPU, as one tensor per layer in the memory format of the products, which nothing reorders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from exssnet.cli.console import one_line_errors
from exssnet.core.engine import Engine, Weights
from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import ScoredSubnetwork, Subnetwork, WeightSubnetwork
from exssnet.data import HorizontalFlip, Normalize, Pipeline, RandomCrop, TensorData, load
from exssnet.data.tensors import Shared
from exssnet.engine import has_triton
from exssnet.engine.cpu.engine import CpuEngine
from exssnet.engine.cuda.engine import CudaEngine
from exssnet.engine.cuda.runner import CudaRunner, Options
from exssnet.errors import DataError
from exssnet.experiments.environment import device_name, versions
from exssnet.methods.base import Phase
from exssnet.methods.masks.supsup import MaskSettings, SupSup
from exssnet.models import build
from exssnet.train.optimizers import optimizer_factory
from exssnet.train.steps import Steps

SHAPES = {"resnet18": ((3, 32, 32), 20), "lenet-300-100": ((1, 28, 28), 10)}
DENSE = {"cpu": ("dense", "by layer"), "cuda": ("dense",)}
MASKED = ("mask", "weights")
IMAGES = 50_000


class DenseSubnetwork(Subnetwork):
    """All weights of the network, trained as one vector."""

    def __init__(self, network: MaskedNetwork, classes: int) -> None:
        super().__init__(network, "dense", classes, network.start_private("dense", classes))
        start = network.weights
        if isinstance(network.runner, CudaRunner):  # in the padded format: its steps need not pad
            start = network.runner.format.padded(start)
        self.values = start.clone().requires_grad_()

    def weights(self) -> Weights:
        runner = self.network.runner
        if isinstance(runner, CudaRunner):
            return runner.format.tensors(self.values.to(runner.options.dtype or self.values.dtype))
        return runner.weights(self.values)

    def mask(self) -> Tensor:
        return torch.ones_like(self.network.weights, dtype=torch.bool)

    def _learned(self) -> list[Tensor]:
        return [self.values]


class ByLayer(DenseSubnetwork):
    """The same, one tensor per layer."""

    def __init__(self, network: MaskedNetwork, classes: int) -> None:
        super().__init__(network, classes)
        layers = network.runner.weights(network.weights)
        self.layers = {name: layer.clone().requires_grad_() for name, layer in layers.items()}

    def weights(self) -> Weights:
        return self.layers

    def _learned(self) -> list[Tensor]:
        return list(self.layers.values())


def images(network: str, device: str, count: int) -> TensorData:
    """N of MNIST's for LeNet, random ones for ResNet-18."""
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


def engine_of(options: argparse.Namespace) -> Engine:
    """The engine that the options ask for; variants that share it share what it compiles."""
    if options.engine == "plain":
        return Engine()
    if options.device == "cpu":
        return CpuEngine()
    low = torch.bfloat16 if options.precision == "bf16" else None
    batch = options.batch_size if options.compile else 0
    return CudaEngine(Options(low, has_triton() and not options.no_kernels, batch))


def cudnn(options: argparse.Namespace) -> AbstractContextManager[None]:
    """What runs allow cuDNN, or its search."""
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=options.search, deterministic=not options.search, allow_tf32=False
    )


def steps_of(kind: str, options: argparse.Namespace, data: TensorData, engine: Engine) -> Steps:
    shape, classes = SHAPES[options.network]
    method = SupSup(build(options.network, shape, classes), MaskSettings(), seed=0)
    method.to(options.device)
    method.use(engine)
    network = method.network
    if kind == "dense":
        method.subnetwork = DenseSubnetwork(network, classes)
    elif kind == "by layer":
        method.subnetwork = ByLayer(network, classes)
    else:
        method.subnetwork = scored = ScoredSubnetwork(network, "task", classes)
        if kind == "weights":
            method.subnetwork = WeightSubnetwork(scored, torch.ones_like(network.bank.used))
    phase = Phase(kind, method.subnetwork.parameters(), 1, options.lr)
    optimizer = optimizer_factory("adam", engine=engine)(phase.parameters, phase.lr)
    data.use(engine)
    return Steps(method, data, phase, optimizer, options.batch_size)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of this program and of those that use its steps, and what follows from them."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--network", default="resnet18", choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--engine", default="fast", choices=["fast", "plain"], help="the device's, or the plain one")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 with the engine of a GPU")
    parser.add_argument("--no-kernels", action="store_true", help="PyTorch's kernels and cuDNN's instead of ours")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile")
    parser.add_argument("--search", action="store_true", help="let cuDNN search for its fastest kernels")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.device == "cpu" and (options.no_kernels or options.precision == "bf16" or options.search):
        parser.error("--no-kernels, --search and bf16 are for a CUDA device")
    fast = options.device == "cuda" and options.engine == "fast"
    if options.precision == "bf16" and not fast:
        parser.error("bf16 needs --engine fast")
    options.precision = options.precision or ("bf16" if fast else "fp32")
    options.compile = fast and has_triton() and not options.no_compile
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
    data, engine = images(options.network, options.device, IMAGES), engine_of(options)
    dense = DENSE[options.device]
    found = {kind: steps_of(kind, options, data, engine) for kind in (*dense, *MASKED)}
    times: dict[str, list[float]] = {name: [] for name in found}
    first: dict[str, float] = {}
    for number in range(options.rounds + 1):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(number)).to(options.device)
        for name, steps in found.items():
            steps.sizes = steps.sizes[: options.steps]  # a round is a part of an epoch
            started = time.perf_counter()
            steps.epoch(order, options.lr, 0, lambda share: None)  # reads the loss: synchronised
            seconds = time.perf_counter() - started
            if name not in first:
                first[name] = seconds  # capture, compilation
            else:
                times[name].append(1000 * seconds / options.steps)

    ways = f"{engine.name} engine" + ", compiled" * options.compile + ", without kernels" * options.no_kernels
    print(f"{options.network}, batch {options.batch_size}, {options.precision}, {ways}, {device_name(options.device)}")
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
