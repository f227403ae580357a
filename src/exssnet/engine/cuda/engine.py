"""The engine for an NVIDIA GPU."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet.core.engine import Engine, ImageKernel, Loop, Runner, Step
from exssnet.core.layout import Layout
from exssnet.core.module.structure import Structure
from exssnet.engine.cuda.capture import CapturedLoop
from exssnet.engine.cuda.runner import CudaRunner, Options, Variant, prepare_compiler
from exssnet.engine.cuda.sharing import holding_gpu


class CudaEngine(Engine):
    """The fast way on a GPU. Runs that share an engine share what was compiled."""

    name = "cuda"

    def __init__(self, options: Options) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._variants: dict[str, Variant] = {}  # by the structure's fingerprint
        self._precompiled: set[tuple[str, int]] = set()  # names of steps, with the sizes of their batches

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaEngine:
        return self  # it holds nothing of a network's own

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaEngine, (self.options,)

    def exclusive(self) -> AbstractContextManager[None]:
        return holding_gpu()

    def prepare(self) -> None:
        if self.options.compiled_batch:
            prepare_compiler()

    def runner(self, structure: Structure, layout: Layout, device: torch.device) -> Runner:
        return CudaRunner(structure, layout, device, self.options, self._variant(structure, layout))

    def _variant(self, structure: Structure, layout: Layout) -> Variant:
        fingerprint = structure.fingerprint()
        if fingerprint is None:
            return Variant(structure, layout, self.options)
        key = f"{fingerprint} {structure.still} {[(layer.name, layer.convolution) for layer in layout.layers]}"
        with self._lock:
            if key not in self._variants:
                self._variants[key] = Variant(structure, layout, self.options)
            return self._variants[key]

    def loop(self, step: Step) -> Loop:
        device = step.total.device
        if device.type != "cuda" or not step.capturable:
            return Loop(step)
        return CapturedLoop(step, device, step.examples, self._precompiled)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self._has_kernel(logits):
            return super().cross_entropy(logits, labels)
        from exssnet.engine.cuda.loss import CrossEntropy

        loss: Tensor = CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
        return loss

    def count(self, total: Tensor, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        if not self._has_kernel(logits):
            super().count(total, loss, logits, labels)
            return
        from exssnet.engine.cuda.loss import count

        with torch.no_grad():
            count(total, loss, logits, labels)

    def adamw(self, parameters: list[Tensor], lr: float, weight_decay: float) -> Optimizer:
        rate = self.rate(lr, parameters[0].device)
        if self.options.kernels and all(p.is_cuda and p.dtype == torch.float32 for p in parameters):
            from exssnet.engine.cuda.adam import LongAdam

            return LongAdam(parameters, rate, weight_decay)
        return torch.optim.AdamW(parameters, rate, weight_decay=weight_decay, fused=True, capturable=True)

    def rate(self, lr: float, device: torch.device) -> Tensor:
        """A tensor on the GPU: a captured step reads it at every replay."""
        return torch.tensor(lr, device=device)

    def images(self, images: Tensor) -> ImageKernel | None:
        if not (self.options.kernels and images.is_cuda and images.dtype == torch.uint8 and images.ndim == 4):
            return None
        from exssnet.engine.cuda.images import Images

        return Images(images)

    def _has_kernel(self, logits: Tensor) -> bool:
        if not (self.options.kernels and logits.is_cuda and logits.dtype == torch.float32):
            return False
        from exssnet.engine.cuda.loss import fits

        return fits(logits)
