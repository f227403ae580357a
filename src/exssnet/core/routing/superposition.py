"""Some tasks of a network run as one: everything that they compute with is mixed, and so are its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from exssnet.core.network import MaskedNetwork

HELD = 2**26  # numbers of all tasks' tensors that are held; where there are more, they are made when needed
SCALING = FACTOR, OFFSET = ".factor", ".offset"  # no tensor of a module has such a name

Tensors = dict[str, Tensor]
Scaling = tuple[Tensor, Tensor]  # factor and offset, as they broadcast with inputs


def descent(logits: Tensor) -> Tensor:
    """−∂H/∂z = p (z − E_p z) of each row: the change of its logits that makes it surer."""
    p = logits.softmax(1)
    z = logits - logits.amax(1, keepdim=True)  # so that the rest is not lost next to a p of nearly one
    return p * (z - (p * z).sum(1, keepdim=True))


class Superposition:
    """Some tasks of a network, run as one.

    It runs a plain copy of the module in the weights' own number type: the kernels of a faster execution have no
    forward mode, and its number type too few digits for a slope.
    """

    def __init__(
        self, network: MaskedNetwork, tasks: Sequence[str], batch_statistics: bool = False,
        scalings: Mapping[str, Scaling] | None = None,
    ) -> None:  # fmt: skip
        self._network = network
        self._scalings = None if scalings is None else [scalings[name] for name in tasks]
        parts = network.structure.skeleton.modules()
        normed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)
        self._batch_statistics = batch_statistics and normed
        self._learned = [network.task(name) for name in tasks]
        self._classes = max(learned.classes for learned in self._learned)
        self._module = network.structure.copy()  # tensors are swapped into it: each caller has one
        read = {name for name, _ in (*self._module.named_parameters(), *self._module.named_buffers())}
        owned = {name: tensor for learned in self._learned for name, tensor in learned.private.items() if name in read}
        # between whole numbers there is nothing: counters and the like stay as they were before any task
        self._own = [name for name, tensor in owned.items() if tensor.is_floating_point()]
        shared = network.frozen | network.buffers
        self._shared = {n: t[: self._classes] if n in self._head else t for n, t in shared.items() if n in read}
        numbers = network.layout.size + sum(owned[name].numel() for name in self._own)
        self._held: dict[int, Tensors] = {}
        self._holds = numbers * len(tasks) <= HELD

    @property
    def _head(self) -> tuple[str, str]:
        return f"{self._network.partition.head}.weight", f"{self._network.partition.head}.bias"

    def tensors(self, task: int) -> Tensors:
        """All that the task computes with and others do not, by name."""
        if task in self._held:
            return self._held[task]
        learned = self._learned[task]
        own = self._network.buffers | learned.private  # a buffer that learning did not move is nobody's own
        tensors = self._network.effective(learned.name) | {name: own[name] for name in self._own}
        for name in self._head:
            if name in tensors:
                tensors[name] = resized(tensors[name], learned.classes, self._classes)
        if self._scalings is not None:
            tensors |= zip(SCALING, self._scalings[task], strict=True)
        if self._holds:
            self._held[task] = tensors
        return tensors

    def mixed(self, among: Sequence[int]) -> Tensors:
        """Σ α_i · tensors(i), the α equal."""
        total = {name: tensor / len(among) for name, tensor in self.tensors(among[0]).items()}
        for task in among[1:]:
            for name, tensor in self.tensors(task).items():
                total[name].add_(tensor, alpha=1 / len(among))
        return total

    def logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        x = x.to(self._network.weights.dtype) if x.is_floating_point() else x
        if self._scalings is not None:
            x = scaled(x, (tensors[FACTOR], tensors[OFFSET]))
            tensors = {name: tensor for name, tensor in tensors.items() if name not in SCALING}
        with (
            _PlainNorms(self._batch_statistics and len(x) > 1),
            sdpa_kernel(SDPBackend.MATH),
        ):  # the other forms of attention have no forward mode
            output = functional_call(self._module, {**self._shared, **tensors}, (x,))
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def slopes_of_rows(self, x: Tensor, among: Sequence[int], chunk: int) -> Tensor:
        """−∂H/∂α of every row [B, among], by a forward-mode product for each task."""
        if len(x) < len(among) and not self._batch_statistics:  # a backward pass for each row is less
            return self._row_by_row(x, among)
        mixed = self.mixed(among)
        columns = []
        for task in among:
            along = self.tensors(task)  # ∂(Σ α_i t_i)/∂α_i = t_i
            try:
                columns.append(torch.cat([self._slope(mixed, along, rows) for rows in torch.split(x, chunk)]))
            except RuntimeError:  # an operator without a rule for forward mode
                return torch.cat([self._row_by_row(rows, among) for rows in torch.split(x, chunk)])
        return torch.stack(columns, 1)

    def _slope(self, mixed: Tensors, along: Tensors, x: Tensor) -> Tensor:
        run = jvp(lambda tensors: self.logits(tensors, x), (mixed,), (along,))  # logits, and their change along
        slope: Tensor = (descent(run[0]) * run[1]).sum(1)
        return slope

    def slopes_of_batch(self, x: Tensor, among: Sequence[int], chunk: int) -> Tensor:
        """−∂H/∂α of the rows' mean entropy [among]: a backward pass to the mixed tensors, then along each task's."""
        mixed = {name: tensor.requires_grad_() for name, tensor in self.mixed(among).items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in mixed.items()}
        for rows in torch.split(x, chunk):
            with torch.enable_grad():
                logits = self.logits(mixed, rows)
            _add(total, mixed, logits, descent(logits.detach()) / len(x))
        return self._along(total, among)

    def _row_by_row(self, x: Tensor, among: Sequence[int]) -> Tensor:
        """The slopes of every row [B, among] by a backward pass for each, through the batch that the rows make."""
        mixed = {name: tensor.requires_grad_() for name, tensor in self.mixed(among).items()}
        found = []
        for rows in [x] if self._batch_statistics else torch.split(x, 1):
            with torch.enable_grad():
                logits = self.logits(mixed, rows)
            flow = descent(logits.detach())
            for row in torch.eye(len(rows), dtype=flow.dtype, device=flow.device):
                total = {name: torch.zeros_like(tensor) for name, tensor in mixed.items()}
                _add(total, mixed, logits, flow * row[:, None])
                found.append(self._along(total, among))
        return torch.stack(found)

    def _along(self, gradient: Tensors, among: Sequence[int]) -> Tensor:
        """A gradient by the mixed tensors, along each task's."""
        products = [[(gradient[name] * t).sum() for name, t in self.tensors(task).items()] for task in among]
        return torch.stack([torch.stack(of_task).sum() for of_task in products])


def _add(total: Tensors, mixed: Tensors, logits: Tensor, flow: Tensor) -> None:
    """Add the gradient of Σ logits · flow by the mixed tensors."""
    gradients = torch.autograd.grad(logits, list(mixed.values()), flow, retain_graph=True, allow_unused=True)
    for name, gradient in zip(mixed, gradients, strict=True):
        if gradient is not None:
            total[name] += gradient


def scaled(x: Tensor, scaling: Scaling) -> Tensor:
    """x · factor + offset."""
    return x * scaling[0] + scaling[1]


def resized(head: Tensor, classes: int, outputs: int) -> Tensor:
    """The head's outputs up to a number, and their mean for those that are missing."""
    own = head[:classes]
    return torch.cat([own, own.mean(0, keepdim=True).expand(outputs - classes, *own.shape[1:])])


_NORMS = {norm: signature(norm) for norm in (functional.batch_norm, functional.instance_norm)}


class _PlainNorms(TorchFunctionMode):
    """Norms with running statistics, written out: torch takes those statistics for constants.

    Forward mode drops their part of the derivative without a word, and backward refuses them.
    """

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self._of_batch = of_batch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS:
            given = _NORMS[func].bind(*args, **kwargs)
            given.apply_defaults()
            of = given.arguments
            if not of.get("training", of.get("use_input_stats")):
                x, statistics = of["input"], (of["running_mean"], of["running_var"])
                if self._of_batch and func is functional.batch_norm:
                    axes = [0, *range(2, x.ndim)]
                    statistics = x.mean(axes), x.var(axes, unbiased=False)
                return normalised(x, *statistics, of["weight"], of["bias"], of["eps"])
        return func(*args, **kwargs)


def normalised(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias for each channel, the second dimension."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    scaled = (x - mean.view(shape)) * scale.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)
