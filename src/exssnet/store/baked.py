"""A task as an ordinary torch module that takes the inputs of `predict` and can be loaded without this package.

It is an `nn.Sequential` of a scaling and a network. The network is the user's module. The layers of a built-in
network, whose class is in this package, are a `torch.fx.GraphModule`, and so is the scaling.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

Scaling = Mapping[str, Any]


def baked(network: nn.Module, card: Mapping[str, Any], ours: bool) -> nn.Sequential:
    """Make a module from raw inputs to logits of a baked network; `ours`: it is a built-in network."""
    parts = OrderedDict(
        scaling=scaling_layer(scaling_of(card), card["recipe"], network),
        network=_as_graph(network) if ours else network,
    )
    return nn.Sequential(parts).eval()


def scaling_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """Scale raw inputs; examples in memory only if they are uint8 images."""
    if card["scaling"] is not None:
        return dict(card["scaling"])
    return {"scale": 1 / 255} if card["recipe"].get("dtype") == "uint8" else {}


def scaling_layer(scaling: Scaling, recipe: Mapping[str, Any], network: nn.Module) -> nn.Module:
    """`(x.float() · scale − mean) / std` as a module of plain operators; indices, such as tokens, are unchanged."""
    if recipe.get("dtype") == "int64":
        return nn.Identity()
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    found: dict[str, Any] = {"scale": 1.0, "mean": [0.0], "std": [1.0]} | dict(scaling)
    shape = (-1, *[1] * (len(recipe["shape"]) - 1))  # per channel of an image, per column of a table
    constants = nn.Module()
    constants.register_buffer("scale", torch.tensor(found["scale"], device=like.device))
    for name in ("mean", "std"):
        constants.register_buffer(name, torch.tensor(found[name], dtype=torch.float32, device=like.device).view(shape))
    graph = fx.Graph()
    x: Any = graph.call_method("float", (graph.placeholder("x"),))
    for operation, name in ((operator.mul, "scale"), (operator.sub, "mean"), (operator.truediv, "std")):
        x = graph.call_function(operation, (x, graph.get_attr(name)))
    if like.dtype == torch.float64:
        x = graph.call_method("double", (x,))
    graph.output(x)
    return fx.GraphModule(constants, graph, "Scaling")


def _as_graph(network: nn.Module) -> fx.GraphModule:
    """Rebuild the layers without classes of this package.

    `fx.symbolic_trace` replaces `__call__` of all modules in the process while it runs, also of those that other
    threads are running.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    layers = {name: part for name, part in network.named_modules() if _is_torchs(part)}

    def noted(name: str) -> Callable[..., Any]:
        return lambda *args, **options: tracer.create_proxy("call_module", name, args, options)

    for name, layer in layers.items():
        layer.forward = noted(name)
    output = network(fx.Proxy(graph.placeholder("x"), tracer))
    for layer in layers.values():
        del layer.forward
    graph.output(output.node)
    return fx.GraphModule(network, graph, type(network).__name__)


def _is_torchs(part: nn.Module) -> bool:
    return type(part).__module__.startswith("torch.nn.") and not isinstance(part, nn.Sequential)


def state_of(module: nn.Sequential) -> dict[str, Tensor]:
    """The network's state_dict on the CPU; tied tensors occur under each of their names."""
    network = module.get_submodule("network")
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in network.state_dict().items()}
