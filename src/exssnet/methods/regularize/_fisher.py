"""The diagonal of the empirical Fisher information: each example's gradient, squared and summed over a batch.

Of a Linear layer y = W a, an example's gradient is δ aᵀ with δ = ∂loss/∂y, so Σ (δ aᵀ)² = (δ²)ᵀ(a²): one product.
Modules with other layers go by per-example gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from exssnet.core.engine import outputs
from exssnet.methods.shared.flat_network import FlatNetwork

HELD = 2**22  # numbers of single examples' gradients that are held at a time

Tensors = dict[str, Tensor]
Loss = Callable[[Tensors, Tensor, Tensor], Tensor]  # of weights, examples and labels: the sum over the examples


def fisher_diagonal(network: FlatNetwork, x: Tensor, labels: Tensor, trained: slice) -> Tensor:
    """Σ over the batch of (∂ an example's loss / ∂ weight)² [weights], in evaluation mode and full precision."""
    skeleton, x = network.structure.skeleton, network.input(x)
    fixed = {**network.frozen, **dict(network.statistics.items())}
    weights = {name: tensor.detach() for name, tensor in network.layout.tensors(network.weights).items()}

    def loss(weights: Tensors, x: Tensor, labels: Tensor) -> Tensor:
        logits = outputs(functional_call(skeleton, {**fixed, **weights}, (x,)))
        return cross_entropy(logits[:, trained], labels, reduction="sum")

    found = _by_layer(skeleton, weights, loss, x, labels)
    if found is None:
        try:
            found = _by_vmap(weights, loss, x, labels)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a branch on a value, an operator without a rule
            found = _one_by_one(weights, loss, x, labels)
    return network.layout.vector(found)


def _by_layer(module: nn.Module, weights: Tensors, loss: Loss, x: Tensor, labels: Tensor) -> Tensors | None:
    """The one product of each layer; None where there are other layers with weights, or code that is not known."""
    parts = dict(module.named_modules())
    layers = {name: part for name, part in parts.items() if next(part.parameters(recurse=False), None) is not None}
    known = all(type(part).__module__.startswith(("torch.nn.", "exssnet.models.")) for part in parts.values())
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))
    if tied or not known or any(type(layer) is not nn.Linear for layer in layers.values()):
        return None
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        zero = torch.zeros_like(out, requires_grad=True)  # its gradient is δ
        calls[name].append((given[0].detach(), zero))
        return out + zero

    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            total = loss(weights, x, labels)
    finally:
        for hook in hooks:
            hook.remove()
    if any(len(seen) != 1 or seen[0][0].ndim != 2 or len(seen[0][0]) != len(x) for seen in calls.values()):
        return None
    deltas = torch.autograd.grad(total, [seen[0][1] for seen in calls.values()], allow_unused=True)
    found = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for (name, ((inputs, _),)), delta in zip(calls.items(), deltas, strict=True):
        if delta is not None:
            squares = delta.square()
            for weight, value in ((f"{name}.weight", squares.T @ inputs.square()), (f"{name}.bias", squares.sum(0))):
                if weight in found:
                    found[weight] = value
    return found


def _by_vmap(weights: Tensors, loss: Loss, x: Tensor, labels: Tensor) -> Tensors:
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    numbers = sum(weight.numel() for weight in weights.values())
    gradients_of = vmap(grad(lambda weights, x, label: loss(weights, x[None], label[None])), (None, 0, 0))
    with sdpa_kernel(SDPBackend.MATH):  # the other forms of attention have no rule
        for some_x, some_labels in _portions(HELD // numbers, x, labels):
            for name, gradients in gradients_of(weights, some_x, some_labels).items():
                total[name] += gradients.square().sum(0)
    return total


def _one_by_one(weights: Tensors, loss: Loss, x: Tensor, labels: Tensor) -> Tensors:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for example, label in _portions(1, x, labels):
        with torch.enable_grad():
            of_example = loss(leaves, example, label)
        found = torch.autograd.grad(of_example, list(leaves.values()), allow_unused=True)
        for name, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                total[name] += gradient.square()
    return total


def _portions(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some examples at a time, at least one."""
    return zip(*(torch.split(tensor, max(1, size)) for tensor in tensors), strict=True)
