"""The diagonal of the empirical Fisher information: each example's gradient, squared and summed over a batch.

Of a linear layer y = W a, an example's gradient is δ aᵀ with δ = ∂loss/∂y. One forward and backward of a batch give a
and δ of all its examples, and Σ (δ aᵀ)² = (δ²)ᵀ(a²) is one product: no example's gradient is ever made. Where many
positions share the weight (tokens, convolutions), gradients are made from a and δ for some examples at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from exssnet.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]
Run = Callable[[dict[str, Tensor], Tensor], Tensor]  # (weights, x) -> outputs

HELD = 2**22  # numbers of single examples' gradients that are held at a time
HELD_BY_VMAP = 2**25  # whose every round costs milliseconds: fewer and larger ones
IN_CACHE = 256  # examples whose squares go into a product at a time


def fisher_diagonal(
    module: nn.Module, weights: Mapping[str, Tensor], fixed: Mapping[str, Tensor], x: Tensor, y: Tensor, loss: Loss
) -> dict[str, Tensor]:
    """Σ over the batch of (∂ an example's loss / ∂ weight)², for each of the weights.

    The module runs on `weights` and its other tensors, `fixed`; its own are not read. It must be in evaluation mode
    and treat every example for itself. `loss(outputs, y)` is the mean of the examples' losses.
    """
    if any(part.training for part in module.modules()):
        raise InputError("the module is in training mode, where an example's loss may depend on others: call eval()")

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        output = functional_call(module, {**fixed, **weights}, (x,))
        out: Tensor = getattr(output, "logits", output)
        return out

    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    layers = _plain_layers(module, leaves)
    with torch.enable_grad():
        with _watched(layers) as calls:
            outputs = run(leaves, x)
        total = loss(outputs, y) * len(x)
        uses = _uses(total)
        if not any(uses[_node(leaf)] for leaf in leaves.values()):
            return {name: torch.zeros_like(weight) for name, weight in weights.items()}
        if layers and _is_clear(calls, uses, leaves, len(x)) and _keeps_examples_apart(run, leaves, x, layers):
            return _by_hand(calls, total, leaves)
        # the loss is not transformed, so that it may be made of anything: its gradient is all that is needed of it
        (inflow,) = torch.autograd.grad(total, outputs)
        del calls, outputs, total, uses  # and with them what was kept for the backward
        try:
            return _by_vmap(run, leaves, x, inflow)
        except RuntimeError:  # a branch on a value, an operator without a rule
            return _one_by_one(run, leaves, x, inflow)


# --- By hand: what the layers saw ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What a layer took and gave, and where the gradient by its output will pass."""

    layer: nn.Module
    a: Tensor
    out: Tensor
    edge: GradientEdge  # of the output as it is now: an operation in place would come after it
    versions: tuple[int, int]

    def is_intact(self) -> bool:
        """Whether input and edge are still what they were; overwriting a view leads its gradient past the edge."""
        versions = self.a._version, self.out._version
        return versions[0] == self.versions[0] and (versions == self.versions or not self.out._is_view())

    def is_of(self, examples: int) -> bool:
        """Whether the first dimension has the length of the batch."""
        batched = self.a.ndim == 4 if isinstance(self.layer, nn.Conv2d) else self.a.ndim >= 2
        return batched and len(self.a) == len(self.out) == examples


Calls = dict[str, list[_Call]]  # by the layer's name


def _plain_layers(module: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The layers that the named weights belong to; none if one of them is of another kind."""
    layers = {}
    for name in names:
        owner, _, short = name.rpartition(".")
        layers[owner] = module.get_submodule(owner)
        # a subclass may do anything with its weight
        if type(layers[owner]) not in (nn.Linear, nn.Conv2d) or short not in ("weight", "bias"):
            return {}
    return layers


@contextmanager
def _watched(layers: Mapping[str, nn.Module]) -> Iterator[Calls]:
    """Note what the layers take and give."""
    calls: Calls = {name: [] for name in layers}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if args and out.requires_grad:
            a = args[0].detach()
            calls[name].append(_Call(layer, a, out, get_gradient_edge(out), (a._version, out._version)))

    # first of all hooks: another one may replace the output
    hooks = [layer.register_forward_hook(partial(note, name), prepend=True) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _node(leaf: Tensor) -> Node:
    """Where a leaf's gradient arrives."""
    return get_gradient_edge(leaf).node


def _uses(total: Tensor) -> Counter[Node]:
    """How many operations on the way to the total take what each one gave, or a leaf."""
    uses: Counter[Node] = Counter()
    ahead = [total.grad_fn] if total.grad_fn is not None else []
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None:
                uses[node] += 1
                if uses[node] == 1:
                    ahead.append(node)
    return uses


def _is_clear(calls: Calls, uses: Counter[Node], leaves: Mapping[str, Tensor], examples: int) -> bool:
    """Whether the one use of each weight, if any, is the one call of its layer, on the examples of the batch."""
    for name, leaf in leaves.items():
        seen = calls[name.rpartition(".")[0]]
        count = uses[_node(leaf)]
        if count and not (count == len(seen) == 1 and uses[seen[0].edge.node] and seen[0].is_of(examples)):
            return False
    return all(call.is_intact() for seen in calls.values() for call in seen)


def _keeps_examples_apart(run: Run, leaves: dict[str, Tensor], x: Tensor, layers: Mapping[str, nn.Module]) -> bool:
    """Whether the first dimension is the batch's, and not by chance of its length: one example makes it 1."""
    if len(x) == 1:
        return True
    with _watched(layers) as calls:
        run(leaves, x[:1])
    return all(call.is_of(1) for seen in calls.values() for call in seen)


def _by_hand(calls: Calls, total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From one backward that computes no gradient by a weight."""
    used = {name: seen[0] for name, seen in calls.items() if seen}
    deltas = torch.autograd.grad(total, [call.edge for call in used.values()], allow_unused=True)
    delta_of = dict(zip(used, deltas, strict=True))
    found = {}
    for name, leaf in leaves.items():
        owner, _, short = name.rpartition(".")
        delta = delta_of.get(owner)
        if delta is None:
            found[name] = torch.zeros_like(leaf)
        elif short == "bias":
            found[name] = _bias(used[owner].layer, delta)
        else:
            found[name] = _weight(used[owner].layer, used[owner].a, delta, leaf)
    return found


def _bias(layer: nn.Module, delta: Tensor) -> Tensor:
    positions = tuple(range(2, delta.ndim) if isinstance(layer, nn.Conv2d) else range(1, delta.ndim - 1))
    return (delta.sum(positions) if positions else delta).square().sum(0)


def _weight(layer: nn.Module, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros_like(weight).flatten(1)
    if delta.ndim == 2:
        for some_a, some_delta in _portions(IN_CACHE, a, delta):
            total.addmm_(some_delta.square().T, some_a.square())
        return total
    numbers = weight.numel()
    if isinstance(layer, nn.Conv2d):  # of the unfolded input there may be more
        numbers = max(numbers, layer.groups * weight[0].numel() * delta[0, 0].numel())
    for some_a, some_delta in _portions(HELD // numbers, a, delta):
        total += _gradients(layer, some_a, some_delta).square_().sum(0)
    return total.view(weight.shape)


def _gradients(layer: nn.Module, a: Tensor, delta: Tensor) -> Tensor:
    """Of single examples, [b, O, I] or [b, O, I/groups · kernel]."""
    if not isinstance(layer, nn.Conv2d):
        return delta.flatten(1, -2).mT @ a.flatten(1, -2)
    padding = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        a, padding = functional.pad(a, layer._reversed_padding_repeated_twice, mode), (0, 0)
    columns = functional.unfold(a, layer.kernel_size, layer.dilation, padding, layer.stride)  # [b, I · kernel, places]
    grouped = (len(a), layer.groups, -1, columns.shape[2])
    return (delta.reshape(grouped) @ columns.view(grouped).mT).flatten(1, 2)


# --- For any module -----------------------------------------------------------------------------------------


def _by_vmap(run: Run, leaves: dict[str, Tensor], x: Tensor, inflow: Tensor) -> dict[str, Tensor]:
    """Gradients of some examples at a time, by a transformation of the whole module."""

    def weighed(weights: dict[str, Tensor], example: Tensor, inflow: Tensor) -> Tensor:
        return (run(weights, example[None])[0] * inflow).sum()

    gradients_of = vmap(grad(weighed), (None, 0, 0))
    weights = {name: leaf.detach() for name, leaf in leaves.items()}
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    numbers = sum(weight.numel() for weight in weights.values())
    with sdpa_kernel(SDPBackend.MATH):  # the other forms of attention have no rule
        for some_x, some_inflow in _portions(HELD_BY_VMAP // numbers, x, inflow):
            for name, gradients in gradients_of(weights, some_x, some_inflow).items():
                total[name] += gradients.square().sum(0)
    return total


def _one_by_one(run: Run, leaves: dict[str, Tensor], x: Tensor, inflow: Tensor) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for example, one_inflow in _portions(1, x, inflow):
        gradients = torch.autograd.grad(run(leaves, example), list(leaves.values()), one_inflow, allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient.square()
    return total


def _portions(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """So many examples at a time, at least one."""
    return zip(*(torch.split(tensor, max(1, size)) for tensor in tensors), strict=True)
