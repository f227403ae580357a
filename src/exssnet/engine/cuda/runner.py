"""Runs a module on a GPU: in low precision, in the memory format that suits it, compiled where that is asked for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from exssnet.core.engine import Runner, Weights, outputs
from exssnet.core.layout import Layout
from exssnet.core.module.structure import Structure
from exssnet.engine.cuda.convolution import fit
from exssnet.engine.cuda.memory_format import PaddedFormat

Call = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Options:
    """How a GPU computes."""

    dtype: torch.dtype | None  # bfloat16: weights are cast once, as one vector; None: that of the weights
    kernels: bool  # whether our kernels can run, which are written in Triton
    compiled_batch: int = 0  # compile the training step for batches of this size; 0: do not


class Variant:
    """A module as these options run it, and what was compiled of it. Networks of one structure share it."""

    def __init__(self, structure: Structure, layout: Layout, options: Options) -> None:
        self.module = structure.copy()
        self.lock = threading.RLock()  # tensors are put into the one module, which has one mode
        convolutions = [layer.name.rpartition(".")[0] for layer in layout.layers if layer.convolution]
        self.narrow = {f"{name}.weight" for name in fit(self.module, convolutions, options.kernels)}
        self.precompiled: set[tuple[torch.Size, bool]] = set()  # shapes of inputs; with a backward pass or without
        self.compiled: Call | None = None
        if options.compiled_batch:
            self.compiled = torch.compile(self.call, dynamic=False, options=_compiler_options())

    def call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's outputs; never in low precision, since a loss and a choice of class follow."""
        x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        out = outputs(functional_call(self.module, tensors, (x,)))
        return out.float() if out.dtype == torch.bfloat16 else out

    def fall_back(self, error: Exception) -> None:
        """Compile nothing from now on."""
        self.compiled = None
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"the network cannot be compiled ({reason}): it runs uncompiled", stacklevel=2)


class CudaRunner(Runner):
    """Runs a module under tensors that are passed in, on a GPU."""

    def __init__(
        self, structure: Structure, layout: Layout, device: torch.device, options: Options, variant: Variant
    ) -> None:
        self.structure, self.layout, self.device, self.options = structure, layout, device, options
        self.variant, self.module, self._lock = variant, variant.module, variant.lock
        self.format = PaddedFormat(layout, device, variant.narrow)

    # --- weights by layer --------------------------------------------------------------------------------------

    def weights(self, vector: Tensor) -> Weights:
        return self.format.tensors(self._cast(self.format.padded(vector)))

    def selection(self, keep: tuple[int, ...]) -> Callable[[Tensor, Tensor], Weights]:
        if not self.options.kernels:
            return super().selection(keep)
        from exssnet.engine.cuda.selection import CudaSelection

        selection = CudaSelection(self.layout, keep, self.format.positions, self.format.size)
        ones = torch.ones(self.layout.size, device=self.device)  # a captured step reads them from its beginning

        def select(scores: Tensor, weights: Tensor) -> Weights:
            if scores.dtype != torch.float32:
                return plain(scores, weights)
            dtype = self.options.dtype or weights.dtype
            if not weights.requires_grad:
                return self.format.tensors(selection.masked_weights(scores, weights, dtype))
            # a mask of ones carries the gradient to the scores, the product that to the weights
            mask = selection.masked_weights(scores, ones, weights.dtype)
            return self.format.tensors(self._cast(self.format.padded(weights) * mask))

        plain = super().selection(keep)
        return select

    def trained(self, fixed: Tensor, index: Tensor) -> Callable[[Tensor], Weights]:
        padded, positions = self._cast(self.format.padded(fixed)), self.format.positions[index]
        if self.options.kernels and fixed.dtype == torch.float32:
            from exssnet.engine.cuda.learned import LearnedValues

            learned = LearnedValues(padded, positions)
            return lambda values: self.format.tensors(learned.vector(values))
        return lambda values: self.format.tensors(padded.index_put((positions,), values.to(padded.dtype)))

    def _cast(self, vector: Tensor) -> Tensor:
        return vector.to(self.options.dtype or vector.dtype)

    # --- running -----------------------------------------------------------------------------------------------

    def run(self, tensors: Mapping[str, Tensor], x: Tensor, *, training: bool, moving: Collection[str] = ()) -> Tensor:
        with self._autocast():
            return super().run(tensors, x, training=training, moving=moving)

    def call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        variant = self.variant
        if self._is_precompiling(x):  # a whole step is; to compile would take as long as in earnest
            variant.precompiled.add((x.shape, torch.is_grad_enabled()))
            return variant.call(tensors, x)
        if variant.narrow and self.options.kernels:
            self._precompile(tensors, x)
        # an epoch's last, smaller batch is not worth a compilation
        if variant.compiled is not None and variant.module.training and len(x) == self.options.compiled_batch:
            try:
                with torch._dynamo.config.patch(recompile_limit=1000):  # every thread has its own; heads differ in size
                    return variant.compiled(tensors, x)
            except RuntimeError as error:
                if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                variant.fall_back(error)
        return variant.call(tensors, x)

    def inputs_of(self, layer: str, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if self.variant.narrow and self.options.kernels and x.is_cuda:  # now: the call below ends at the layer
            with self._lock, self._autocast():
                self.structure.set_mode(self.module, False)
                self._precompile(tensors, x)
        return super().inputs_of(layer, tensors, x)

    def _autocast(self) -> AbstractContextManager[object]:
        low = self.options.dtype
        return nullcontext() if low is None else torch.autocast("cuda", low, cache_enabled=False)

    def _precompile(self, tensors: Mapping[str, Tensor], x: Tensor) -> None:
        """Before the first call with inputs of a shape: compile our kernels for it, all at the same time."""
        backward = torch.is_grad_enabled()
        if (x.shape, backward) in self.variant.precompiled:
            return
        self.variant.precompiled.add((x.shape, backward))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.structure.unread}
        # weights at their addresses, since kernels depend on those; of what the module may change, copies
        weights = {layer.name for layer in self.layout.layers}
        copies = {name: t.detach() if name in weights else t.detach().clone() for name, t in tensors.items()}
        stand_in = {name: t.requires_grad_(tensors[name].requires_grad) for name, t in copies.items()}

        def pass_through() -> None:
            out = self.variant.call(stand_in, x)
            if backward and out.requires_grad:
                out.sum().backward()  # type: ignore[no-untyped-call]

        precompile(x.device, pass_through)

    def _is_precompiling(self, x: Tensor) -> bool:
        if not (x.is_cuda and self.options.kernels):
            return False
        from exssnet.engine.cuda.kernels import precompiling

        return precompiling()


def precompile(device: torch.device, function: Callable[[], None]) -> None:
    """Compile the kernels that a function launches, where Triton can; its own randomness is put back."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return
    from exssnet.engine.cuda import kernels

    with torch.random.fork_rng(devices=[device]):
        kernels.precompile(function)


@cache
def prepare_compiler() -> None:
    """Import the compiler and start its processes while this thread goes on."""

    def prepare() -> None:
        import_module("torch._inductor.compile_fx")
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()

    threading.Thread(target=prepare, daemon=True).start()


def _compiler_options() -> dict[str, str | int | bool | Callable[..., Any]]:
    from torch._inductor import config

    # what runs on the second stream of a captured step reads buffers later than the compiler thinks
    options: dict[str, str | int | bool | Callable[..., Any]] = {"allow_buffer_reuse": False, "inplace_buffers": False}
    if hasattr(config, "deterministic"):  # the order of sums must not follow from a timing
        options["deterministic"] = True
    if hasattr(config.triton, "mix_order_reduction"):  # it fails on gates that depend on the example (torch 2.11)
        options["triton.mix_order_reduction"] = False
    return options
