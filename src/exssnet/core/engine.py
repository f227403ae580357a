"""How a network computes, and not what: the plain way, and the one protocol that a faster way fills in.

`core` runs by itself with an `Engine()`. The engines of `exssnet.engine` override single operations; a test holds each
to the plain one. Results are the same up to rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer

from exssnet.core.layout import Layout
from exssnet.core.module.structure import Structure
from exssnet.core.selection import masked_weights
from exssnet.errors import InputError

Weights = dict[str, Tensor]  # of each layer, as the module runs with them
Progress = Callable[[float], None]  # is told the share of an epoch that is done

EVALUATED = 500  # examples in a batch that is not trained on, at most; on a GPU kernels depend on how many there are
FEWEST = 16  # on a CPU
IN_CACHE = 3 << 17  # numbers in such a batch there: with more, a layer's outputs leave the processor's caches


def at_once(shape: Sequence[int], device: torch.device) -> int:
    """How many examples of this shape to compute at once where nothing is trained."""
    if device.type != "cpu":
        return EVALUATED
    return min(max(IN_CACHE // max(prod(shape), 1), FEWEST), EVALUATED)


class Step(Protocol):
    """One step of training: from the positions of a batch's examples to changed parameters."""

    sizes: list[int]  # of an epoch's batches
    generator: torch.Generator  # all that a step draws itself
    total: Tensor  # counted up by each step
    name: str
    examples: int  # that an epoch chooses from
    capturable: bool  # False: it reads a file or calls code that looks at values, so every step needs Python

    def __call__(self, index: Tensor) -> None: ...

    def forget_gradients(self) -> None:
        """Let go of the gradients of the last step."""

    def optimizer_state(self) -> list[Tensor]:
        """The tensors that the optimizer made with its first step."""

    def moving(self) -> list[Tensor]:
        """Everything else that a step changes."""


class ImageKernel(Protocol):
    """Makes batches of stored images [N, C, H, W] of bytes."""

    def batch(
        self, rows: Tensor, table: Tensor, corners: Tensor | None, padding: int, flipped: Tensor | None
    ) -> Tensor: ...


class Loop:
    """Runs a step over an epoch's batches."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def epoch(self, order: Tensor, progress: Progress) -> None:
        """One pass over the examples in this order."""
        done = 0
        for number, size in enumerate(self.step.sizes, start=1):
            self.step(order[done : done + size])
            done += size
            progress(number / len(self.step.sizes))


class Runner:
    """Runs one module under tensors that are passed in."""

    def __init__(self, structure: Structure, layout: Layout, device: torch.device) -> None:
        self.structure, self.layout, self.device = structure, layout, device
        self.module = structure.copy()
        self._lock = threading.RLock()  # tensors are put into the one module, which has one mode

    # --- weights by layer --------------------------------------------------------------------------------------

    def weights(self, vector: Tensor) -> Weights:
        """A vector's weights by layer; differentiable."""
        return self.layout.tensors(vector)

    def fixed(self, vector: Tensor) -> Weights:
        """The same of weights that stay as they are."""
        return self.weights(vector)

    def selection(self, keep: tuple[int, ...]) -> Callable[[Tensor, Tensor], Weights]:
        """What makes the weights under the mask of scores, step after step; differentiable in both."""

        def select(scores: Tensor, weights: Tensor) -> Weights:
            if weights.requires_grad:  # a mask of ones carries the gradient to the scores, the product to the weights
                return self.weights(weights * masked_weights(scores, torch.ones_like(weights), self.layout, keep))
            return self.weights(masked_weights(scores, weights, self.layout, keep))

        return select

    def trained(self, fixed: Tensor, index: Tensor) -> Callable[[Tensor], Weights]:
        """What puts values that are trained at these positions of a vector, step after step; differentiable."""

        def with_values(values: Tensor) -> Weights:
            return self.weights(fixed.index_put((index,), values))

        return with_values

    # --- running -----------------------------------------------------------------------------------------------

    def run(self, tensors: Mapping[str, Tensor], x: Tensor, *, training: bool, moving: Collection[str] = ()) -> Tensor:
        """The module's outputs under these tensors. It may change those that are `moving`, and no other."""
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.structure.unread}
        versions = {name: tensor._version for name, tensor in tensors.items() if name not in moving}
        with self._lock:
            self.structure.set_mode(self.module, training)
            output = self.call(tensors, x)
        for name, version in versions.items():
            if tensors[name]._version != version:
                raise InputError(
                    f"the module changes its tensor '{name}' while it runs, so that tasks would disturb each other: "
                    f"make it a buffer that changes in training only"
                )
        return output

    def call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The outputs in the mode that is set."""
        return outputs(functional_call(self.module, tensors, (x,)))

    def inputs_of(self, layer: str, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """What a layer sees in evaluation mode when it is first called. Neither it nor what follows is computed."""
        seen: list[Tensor] = []

        def look(_: object, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            seen.append(args[0] if args else next(iter(named.values())))
            raise _Seen

        with self._lock:
            hook = self.module.get_submodule(layer).register_forward_pre_hook(look, with_kwargs=True)
            try:
                self.run(tensors, x, training=False)
            except _Seen:
                pass
            finally:
                hook.remove()
        return seen[0]


class Engine:
    """The plain way to compute: the module's own number type and memory format, one operation after the other."""

    name = "plain"

    def prepare(self) -> None:
        """Start what takes long to start, while the caller goes on."""
        return

    def exclusive(self) -> AbstractContextManager[None]:
        """Have the device to oneself where threads that train on it would disturb each other."""
        return nullcontext()

    def runner(self, structure: Structure, layout: Layout, device: torch.device) -> Runner:
        """What runs a module whose weights these are."""
        return Runner(structure, layout, device)

    def loop(self, step: Step) -> Loop:
        """What runs a step epoch after epoch."""
        return Loop(step)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch."""
        return functional.cross_entropy(logits, labels)

    def count(self, total: Tensor, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the totals [2]: its summed loss, its correct answers."""
        with torch.no_grad():
            total[0] += loss.detach() * len(labels)
            total[1] += (logits.detach().argmax(1) == labels).sum()

    def adamw(self, parameters: list[Tensor], lr: float, weight_decay: float) -> Optimizer:
        """`torch.optim.AdamW`, or what computes the same."""
        return torch.optim.AdamW(parameters, lr, weight_decay=weight_decay, fused=True)

    def rate(self, lr: float, device: torch.device) -> float | Tensor:
        """A learning rate as this engine's optimizers take it."""
        return lr

    def images(self, images: Tensor) -> ImageKernel | None:
        """A kernel that makes batches of these stored images in one launch; None where there is none."""
        return None


class _Seen(BaseException):
    """All that was wanted of a module's run is there; nothing that the module may want to handle."""


def outputs(output: Any) -> Tensor:
    """Logits of a module, which may be an attribute of what it returns."""
    out: Tensor = getattr(output, "logits", output)
    return out
