"""A network all of whose weights may move: the state of the methods that train one dense network.

Like `MaskedNetwork` it holds a module's tensors beside the module, the trainable parameters as one vector. So a
penalty, a projection or a path integral over all weights is one line, whatever the module is made of.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from exssnet.core.module.accept import accepted
from exssnet.core.module.skeleton import Runner
from exssnet.core.partition import head_layer_of, still_parts, trainable
from exssnet.engine.execution import PLAIN, Execution
from exssnet.engine.loss import cross_entropy
from exssnet.engine.memory_format import Arrangement, arrange
from exssnet.methods.shared.fisher import fisher_diagonal


class DenseNetwork:
    """A module, its weights as one leaf vector, and its buffers."""

    def __init__(self, module: nn.Module) -> None:
        module = accepted(module)
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.layout = trainable(module)
        self.head = head_layer_of(module)
        self.start = self.layout.vector(parameters)  # the weights before any training
        self.weights = self.start.clone().requires_grad_()
        self.frozen = {name: p for name, p in parameters.items() if name not in self.layout.names}
        self.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        self.start_buffers = {name: b.clone() for name, b in self.buffers.items()}
        self.runner = Runner(module, still_parts(module))
        self.arrangement: Arrangement
        self.execute(PLAIN)

    def execute(self, execution: Execution) -> None:
        """Compute this way from now on."""
        self.arrangement = arrange(self.runner, self.layout, execution, self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def run(
        self, x: Tensor, *, training: bool, weights: Tensor | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """All outputs [B, O]; with other weights and buffers than the network's own where they are given."""
        layers, tensors = self._tensors(weights, buffers)
        fixed = {**self.frozen, **layers} if training else tensors
        return self.runner.run(tensors, self._input(x), training=training, fixed=fixed)

    def features(self, x: Tensor) -> Tensor:
        """What the head layer sees, [B, features], in evaluation mode."""
        with torch.no_grad():
            return self.runner.inputs_of(self.head, self._tensors()[1], self._input(x)).flatten(1)

    def fisher(self, x: Tensor, labels: Tensor, outputs: slice) -> Tensor:
        """Σ over the batch of the squared gradient of each example's loss, in evaluation mode and full precision."""
        fixed = {**self.frozen, **self.buffers}
        weights = self.layout.tensors(self.weights.detach())

        def loss(logits: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(logits[:, outputs], y)

        found = fisher_diagonal(self.runner.skeleton, weights, fixed, self._input(x), labels, loss)
        return self.layout.vector(found)

    def reset(self) -> None:
        """Take back all training."""
        with torch.no_grad():
            self.weights.copy_(self.start)
            for name, buffer in self.buffers.items():
                buffer.copy_(self.start_buffers[name])

    def to(self, device: str | torch.device) -> None:
        self.start = self.start.to(device)
        self.weights = self.weights.detach().to(device).requires_grad_()
        self.arrangement.to(device)
        for group in (self.frozen, self.buffers, self.start_buffers):
            group.update({name: tensor.to(device) for name, tensor in group.items()})

    def _tensors(
        self, weights: Tensor | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The layers' weights, and all tensors of the module."""
        arranged = self.arrangement(self.weights if weights is None else weights)
        layers = self.arrangement.tensors(arranged.to(self.runner.execution.autocast or arranged.dtype))
        return layers, {**self.frozen, **(self.buffers if buffers is None else buffers), **layers}

    def _input(self, x: Tensor) -> Tensor:
        return x.to(self.weights.dtype) if x.is_floating_point() else x
