"""How the numbers of `core` are computed fast. `choose` is the one door."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec

import torch

from exssnet.core.engine import Engine
from exssnet.errors import InputError

PRECISIONS = ("auto", "fp32", "bf16")
COMPILES = ("auto", "on", "off")


def choose(
    device: str | torch.device, precision: str = "auto", compile: str = "auto", batch_size: int = 64
) -> Engine:  # fmt: skip
    """The fastest engine for a device.

    `precision`: bf16 (the default on a GPU that has it) or fp32. `compile`: whether steps of `batch_size` examples go
    through torch.compile (the default on a GPU with Triton).
    """
    device = torch.device(device)
    precision, compile = resolve(device, precision, compile)
    if device.type == "cuda":
        from exssnet.engine.cuda.engine import CudaEngine
        from exssnet.engine.cuda.runner import Options

        low = torch.bfloat16 if precision == "bf16" else None
        return CudaEngine(Options(low, has_triton(), batch_size if compile == "on" else 0))
    if device.type == "cpu":
        from exssnet.engine.cpu.engine import CpuEngine

        return CpuEngine()
    return Engine()


def resolve(device: str | torch.device, precision: str, compile: str) -> tuple[str, str]:
    """Precision and compile of a device, where they are `auto`; what the device cannot do is refused."""
    for name, value, choices in (("precision", precision, PRECISIONS), ("compile", compile, COMPILES)):
        if value not in choices:
            raise InputError(f"{name} is '{value}': choose one of {', '.join(choices)}")
    device = torch.device(device)
    if device.type != "cuda":
        if precision == "bf16":
            raise InputError("precision bf16 is about ten times slower than fp32 on a CPU: use fp32, or --device cuda")
        if compile == "on":
            raise InputError("compile on needs a GPU: use --compile off, or --device cuda")
        return "fp32", "off"
    with torch.cuda.device(device):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16" and not has_bf16:
        raise InputError(f"precision bf16 is not supported by {device}: use fp32")
    if compile == "on" and not has_triton():
        raise InputError("compile on needs Triton, which is not installed: use --compile off, or install triton")
    precision = precision if precision != "auto" else "bf16" if has_bf16 else "fp32"
    return precision, compile if compile != "auto" else "on" if has_triton() else "off"


def before_cuda() -> None:
    """Set what must be set before the first question to CUDA starts it."""
    from exssnet.engine.cuda.sharing import ask_for_connections

    ask_for_connections()


def threads(device: str, count: int) -> ThreadPoolExecutor:
    """Threads whose work on a device does not disturb each other."""
    from exssnet.engine.cuda.sharing import GpuThreads

    return GpuThreads(device, count)


@cache
def has_triton() -> bool:
    """Whether Triton is installed, for kernels of our own and for torch.compile on a GPU."""
    return find_spec("triton") is not None
