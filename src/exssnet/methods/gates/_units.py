"""A copy of a module whose hidden units can be turned down or off: every one is multiplied by a number.

A unit is an output channel of a convolution or an output of a Linear layer. Its factor stands behind the norm layer
that follows in a Sequential: before it, the norm would take the factor out again. A unit at zero hands on zeros, so
what comes after it does not depend on its weights.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exssnet.core.layout import Layout
from exssnet.core.partition import head_layer_of
from exssnet.errors import InputError

Hidden = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_HIDDEN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = nn.modules.batchnorm._NormBase  # those that look at each unit by itself
# what leaves each unit where it is, and a zero a zero
_POINTWISE = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Dropout)
_SPATIAL = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)


class Gate(nn.Module):
    """A hidden layer and the norm behind it, each unit times its factor."""

    def __init__(self, layer: Hidden, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm
        self.linear = isinstance(layer, nn.Linear)
        self.units: int = len(layer.weight)

    @abstractmethod
    def factors(self, x: Tensor) -> Tensor:
        """[units], or [B, units] where they depend on the example."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        factors = self.factors(x).to(out.dtype)
        ones = [1] * (out.ndim - 2)  # the positions of an image, or of a sequence
        shape = [*factors.shape[:-1], *ones, self.units] if self.linear else [*factors.shape, *ones]
        return out * factors.view(shape)


@dataclass(frozen=True)
class GatedLayer:
    """Where a gate is, and which gated layer's units are its inputs; None where they are not those of exactly one."""

    name: str
    units: int
    inputs: int
    source: int | None


def gated(module: nn.Module, gate: Callable[[Hidden, nn.Module], Gate]) -> tuple[nn.Module, list[GatedLayer]]:
    """A copy with a gate on every hidden layer, and those layers in order."""
    copied = copy.deepcopy(module)
    walk = _Walk(copied.get_submodule(head_layer_of(copied)), gate)
    walk.into(copied, "", None)
    if not walk.found:
        raise InputError("the network has nothing to gate: it needs a Linear or convolution layer before its head")
    return copied, walk.found


def freedom(
    layout: Layout, layers: Sequence[GatedLayer], used: Sequence[Tensor], *, head: str, settled: bool
) -> Tensor:
    """How far each weight may move, 0 to 1, given how far each unit is used, in the order of the weights.

    1 − min(used of its unit, used of its input), and 1 − used of its unit where the input is not known. The head is
    each task's own: 1. What belongs to no unit all tasks see: 1 before the first task is settled, then 0.
    """
    owners = {layer.name: (layer, units) for layer, units in zip(layers, used, strict=True)}
    pieces: list[Tensor] = []
    for parameter in layout.layers:
        owner, _, short = parameter.name.rpartition(".")
        layer, out = owners.get(owner.rpartition(".")[0], (None, used[0]))
        if owner == head or layer is None:
            pieces.append(out.new_full((parameter.size,), float(owner == head or not settled)))
            continue
        held = out.view(-1, *[1] * (len(parameter.shape) - 1))
        if layer.source is not None and owner.endswith(".layer") and short == "weight":
            inputs = used[layer.source]
            inputs = inputs.repeat_interleave(parameter.shape[1] // len(inputs))  # a flattened channel is many inputs
            held = torch.minimum(held, inputs.view(1, -1, *[1] * (len(parameter.shape) - 2)))
        pieces.append((1 - held).expand(parameter.shape).reshape(-1))
    return torch.cat(pieces)


@dataclass(frozen=True)
class _Source:
    """Whose units a tensor holds: all of one gated layer's, and nothing else."""

    index: int
    linear: bool
    flat: bool = False  # the channels of images laid out one after the other


class _Walk:
    """Puts the gates in, and follows the units along each chain."""

    def __init__(self, head: nn.Module, gate: Callable[[Hidden, nn.Module], Gate]) -> None:
        self.head, self.gate = head, gate
        self.found: list[GatedLayer] = []
        self.seen: set[int] = set()

    def into(self, part: nn.Module, name: str, source: _Source | None) -> _Source | None:
        """Gate what is inside; whose units come out. Only in a Sequential is it plain what follows what."""
        chain = type(part) is nn.Sequential
        names = list(part._modules)
        for number, short in enumerate(names):
            child = part._modules[short]
            inner = f"{name}.{short}" if name else short
            source = source if chain else None
            if child is None or child is self.head:
                source = None
            elif isinstance(child, _HIDDEN) and type(child) in _HIDDEN:  # a subclass may be used in other ways
                norm: nn.Module = nn.Identity()
                following = names[number + 1] if chain and number + 1 < len(names) else None
                if following is not None and isinstance(part._modules[following], _NORMS):
                    norm, part._modules[following] = part.get_submodule(following), nn.Identity()
                part._modules[short] = self._gated(child, norm, inner, source)
                source = _Source(len(self.found) - 1, isinstance(child, nn.Linear))
            else:
                source = self._through(child, inner, source)
        return source if chain else None

    def _gated(self, layer: Hidden, norm: nn.Module, name: str, source: _Source | None) -> Gate:
        if id(layer) in self.seen:
            raise InputError(f"layer '{name}' is used twice in the network: its units cannot be gated")
        self.seen.add(id(layer))
        gate = self.gate(layer, norm)
        known = source.index if source is not None and _are_inputs(self.found[source.index], source, layer) else None
        self.found.append(GatedLayer(name, gate.units, _inputs(layer), known))
        return gate

    def _through(self, part: nn.Module, name: str, source: _Source | None) -> _Source | None:
        if source is not None and isinstance(part, _POINTWISE):
            return source
        if source is not None and isinstance(part, _SPATIAL):
            return source if not source.linear and not source.flat else None
        if source is not None and isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            return _Source(source.index, source.linear, flat=True)
        return self.into(part, name, source)


def _inputs(layer: Hidden) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _are_inputs(before: GatedLayer, source: _Source, layer: Hidden) -> bool:
    """Whether a layer's inputs are the units of the one before, each once or once per position of an image."""
    if not isinstance(layer, nn.Linear):
        return not source.linear and not source.flat and layer.groups == 1
    if source.linear:
        return layer.in_features == before.units
    return source.flat and layer.in_features % before.units == 0
