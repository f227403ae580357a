"""The network as the last task left it, whose outputs a later task is held to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exssnet.methods.base import Tensors
from exssnet.methods.shared.flat_network import FlatNetwork


class Teacher(nn.Module):
    """A network's weights and statistics at some time."""

    weights: Tensor

    def __init__(self, network: FlatNetwork) -> None:
        super().__init__()
        self.register_buffer("weights", network.start.clone())
        self.statistics = Tensors({name: tensor.clone() for name, tensor in network.statistics.items()})

    def follow(self, network: FlatNetwork) -> None:
        """Be the network as it is now."""
        self.weights = network.weights.detach().clone()
        self.statistics.update({name: tensor.clone() for name, tensor in network.statistics.items()})

    def outputs(self, network: FlatNetwork, x: Tensor) -> Tensor:
        """All outputs [B, O] as they were then."""
        with torch.no_grad():
            out: Tensor = network(x, training=False, weights=self.weights, statistics=self.statistics)
        return out
