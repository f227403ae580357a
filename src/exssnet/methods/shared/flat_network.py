"""A network all of whose weights may move: the state of the methods that train one dense network.

Like `MaskedNetwork` it holds a module's tensors next to the module, the trainable parameters as one vector. So a
penalty, a projection or a path integral over all weights is one line, whatever the module is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from exssnet.core.engine import Engine
from exssnet.core.module.accept import accepted
from exssnet.core.module.structure import Structure
from exssnet.core.partition import head_layer_of, still_parts, trainable
from exssnet.methods.base import Tensors


class FlatNetwork(nn.Module):
    """A module, its weights as one leaf vector, and its statistics: what the module has as buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        module = accepted(module)
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.layout = trainable(module)
        self.head = head_layer_of(module)
        self.start = self.layout.vector(parameters)  # the weights before any training
        self.weights = nn.Parameter(self.start.clone())
        self.frozen = {name: p for name, p in parameters.items() if name not in self.layout.names}
        self.statistics = Tensors({name: b.detach().clone() for name, b in module.named_buffers()})
        self.start_statistics = {name: b.clone() for name, b in self.statistics.items()}
        self.structure = Structure(module, still_parts(module))
        self.use(Engine())

    def use(self, engine: Engine) -> None:
        """Compute with this engine from now on."""
        self.engine = engine
        self.runner = engine.runner(self.structure, self.layout, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "runner"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.use(self.engine)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def forward(
        self, x: Tensor, *, training: bool, weights: Tensor | None = None,
        statistics: Mapping[str, Tensor] | Tensors | None = None,
    ) -> Tensor:  # fmt: skip
        """All outputs [B, O]; with other weights and statistics than the network's own where they are given."""
        tensors = self._tensors(weights, statistics)
        own = set(tensors) - self.frozen.keys() - self.layout.names if training else ()
        return self.runner.run(tensors, self.input(x), training=training, moving=own)

    def features(self, x: Tensor) -> Tensor:
        """What the head layer sees, [B, features], in evaluation mode."""
        with torch.no_grad():
            return self.runner.inputs_of(self.head, self._tensors(), self.input(x)).flatten(1)

    def reset(self) -> None:
        """Take back all training."""
        with torch.no_grad():
            self.weights.copy_(self.start)
            for name, tensor in self.statistics.items():
                tensor.copy_(self.start_statistics[name])

    def input(self, x: Tensor) -> Tensor:
        """In the weights' number type; indices, such as tokens, as they are."""
        return x.to(self.weights.dtype) if x.is_floating_point() else x

    def _tensors(
        self, weights: Tensor | None = None, statistics: Mapping[str, Tensor] | Tensors | None = None
    ) -> dict[str, Tensor]:
        layers = self.runner.weights(self.weights if weights is None else weights)
        return {**self.frozen, **dict((self.statistics if statistics is None else statistics).items()), **layers}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.start = fn(self.start)
        for group in (self.frozen, self.start_statistics):
            group.update({name: fn(tensor) for name, tensor in group.items()})
        self.use(self.engine)
        return self
