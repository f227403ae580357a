"""Convolution, batch normalisation, the sum with another branch and ReLU as one unit of a training step.

A step of a narrow network is too short for its launches: what counts is how many there are. A unit has two forward and,
beside the gradient of its weight, three backward. Which layers make a unit is read from the module's graph; the graph
then runs with units in their place. A module whose graph cannot be read, or which has normalisation elsewhere, is left
to the compiler.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from exssnet.core import side
from exssnet.core.convolution import is_narrow, ordered
from exssnet.core.kernels import has_kernels

COUNTERS = 16  # of a unit: one for every 32 output channels forward, one backward
ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (torch.relu, functional.relu)


class Geometry(NamedTuple):
    """What of a unit is no tensor."""

    number: int  # in the order in which they run
    stride: int
    padding: int
    epsilon: float
    momentum: float
    relu: bool


def fuse(module: nn.Module, widest: int) -> fx.GraphModule | None:
    """The module with units for its convolutions of at most so many channels; None where that leaves something out."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # a graph that depends on values raises anything
        return None
    layers = dict(module.named_modules())
    for node in [node for node in graph.nodes if _is(node, layers, nn.Identity)]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    norms = [node for node in graph.nodes if _is(node, layers, nn.BatchNorm2d)]
    every = sum(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in layers.values())
    if not norms or len({node.target for node in norms}) != len(norms) or every != len(norms):
        return None
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(first):
        counters = graph.call_function(_counters, (first, COUNTERS * len(norms)))
    for number, norm in enumerate(norms):
        if not _replace(graph, layers, norm, number, counters, widest):
            return None
    graph.lint()
    return fx.GraphModule(module, graph)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


def _is(node: fx.Node, layers: dict[str, nn.Module], kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(layers[str(node.target)], kind)


def _replace(
    graph: fx.Graph, layers: dict[str, nn.Module], norm: fx.Node, number: int, counters: fx.Node, widest: int
) -> bool:
    """Put a unit in the place of a normalisation and what belongs to it, if it is one that we know."""
    (convolution,) = norm.args
    if not isinstance(convolution, fx.Node) or not _is(convolution, layers, nn.Conv2d) or len(convolution.users) != 1:
        return False
    layer, statistics = layers[str(convolution.target)], layers[str(norm.target)]
    assert isinstance(layer, nn.Conv2d)
    assert isinstance(statistics, nn.BatchNorm2d)
    if not is_narrow(layer, widest) or statistics.affine or not statistics.track_running_stats:
        return False
    if statistics.momentum is None:
        return False
    last, residual = norm, None
    follower = _only_user(norm)
    if follower is not None and follower.op == "call_function" and follower.target in ADDS and not follower.kwargs:
        others = [argument for argument in follower.args if argument is not norm]
        if len(follower.args) == 2 and len(others) == 1 and isinstance(others[0], fx.Node) and others[0] < norm:
            last, residual = follower, others[0]
            follower = _only_user(follower)
    relu = follower is not None and (
        _is(follower, layers, nn.ReLU) or (follower.op == "call_function" and follower.target in RELUS)
    )
    if relu and follower is not None:
        last = follower
    elif residual is not None:  # a sum that nothing follows is left as it is
        last, residual = norm, None
    with graph.inserting_before(last):
        weight = graph.get_attr(f"{convolution.target}.weight")
        mean, variance = (graph.get_attr(f"{norm.target}.{name}") for name in ("running_mean", "running_var"))
        geometry = Geometry(
            number, int(layer.stride[0]), int(layer.padding[0]), statistics.eps, statistics.momentum, relu
        )
        new = graph.call_function(unit, (convolution.args[0], weight, residual, mean, variance, counters, geometry))
    last.replace_all_uses_with(new)
    for node in dict.fromkeys((last, *_between(last, norm), norm, convolution)):
        graph.erase_node(node)
    return True


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _between(last: fx.Node, norm: fx.Node) -> list[fx.Node]:
    """The sum between a normalisation and its ReLU, if there is one."""
    return [node for node in last.all_input_nodes if node is not norm and norm in node.all_input_nodes]


def _counters(x: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=x.device)


def unit(
    x: Tensor, weight: Tensor, residual: Tensor | None, running_mean: Tensor, running_var: Tensor, counters: Tensor,
    geometry: Geometry,
) -> Tensor:  # fmt: skip
    """relu(normalised convolution [+ residual]) with the statistics of the batch; moves the running ones."""
    x = x.to(weight.dtype)
    if has_kernels(x, torch.bfloat16):
        out: Tensor = _Unit.apply(x, weight, residual, running_mean, running_var, counters, geometry)  # type: ignore[no-untyped-call]
        return out
    y = torch.conv2d(x, weight, stride=geometry.stride, padding=geometry.padding)
    z = functional.batch_norm(
        y, running_mean, running_var, training=True, momentum=geometry.momentum, eps=geometry.epsilon
    )
    z = z if residual is None else z + residual
    return z.relu() if geometry.relu else z


class _Unit(torch.autograd.Function):
    """The same by kernels of our own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, running_mean: Tensor, running_var: Tensor,
        counters: Tensor, geometry: Geometry,
    ) -> Tensor:  # fmt: skip
        from exssnet.core import convolution_triton, norm_triton

        x, weight = ordered(x), ordered(weight)
        residual = None if residual is None else ordered(residual.to(x.dtype))
        mine = counters[COUNTERS * geometry.number :]
        sums = torch.empty((2, len(weight)), device=x.device)
        y = convolution_triton.forward(x, weight, geometry.stride, geometry.padding, sums=sums, finished=mine)
        z = norm_triton.normalise(
            y, sums, residual, running_mean, running_var, geometry.epsilon, geometry.momentum, geometry.relu
        )
        ctx.save_for_backward(x, weight, y, z if geometry.relu else y, sums, mine)
        ctx.geometry = geometry
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from exssnet.core import convolution_triton, norm_triton

        x, weight, y, z, sums, mine = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        of_x, of_weight, of_residual = ctx.needs_input_grad[:3]
        inflow = ordered(gradients[0].to(x.dtype))
        of_y, passed = norm_triton.gradient(
            inflow, z, y, sums, geometry.epsilon, geometry.relu, mine[COUNTERS - 1 :], of_residual
        )
        weight_gradient, gradient = None, None
        if of_weight:
            with side.beside(of_y, x) as kept:
                weight_gradient = kept(
                    convolution_triton.weight_gradient(of_y, x, weight.shape[2], geometry.stride, geometry.padding)
                )
        if of_x:
            height, width = x.shape[2:]
            gradient = convolution_triton.input_gradient(of_y, weight, height, width, geometry.stride, geometry.padding)
        return gradient, weight_gradient, passed, None, None, None, None
