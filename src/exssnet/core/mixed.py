"""A batch whose rows are of different tasks, computed at once.

The tasks' weights are stacked and the network runs on all of them in one go (`vmap`): for small layers, where a call
costs more than its products, that is several times faster than one task after the other. Convolutions with weights of
their own for every group are slow on all libraries; networks with any go task by task.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from exssnet.core.network import MaskedNetwork

STACKED_BYTES = 256 * 2**20  # of stacked weights, at most


class Mixed:
    """Runs batches of several tasks on a network; keeps the stacks it used last."""

    def __init__(self, network: MaskedNetwork) -> None:
        self.network = network
        self._stacks: OrderedDict[tuple[str, ...], dict[str, Tensor]] = OrderedDict()
        parts = network.runner.skeleton.modules()
        self._stackable = not any(isinstance(part, nn.modules.conv._ConvNd) for part in parts)

    def logits(self, groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per task the outputs [rows, classes] for its inputs [rows, ...]."""
        network = self.network
        names = tuple(sorted(groups))
        room = STACKED_BYTES // (network.layout.size * network.weights.element_size())
        same = len({x.shape[1:] for x in groups.values()} | {x.dtype for x in groups.values()}) == 2
        if not self._stackable or not 1 < len(names) <= room or not same:
            return {name: network.logits(x.to(network.device), name) for name, x in groups.items()}
        rows = max(map(len, groups.values()))
        x = torch.stack([_longer(groups[name], rows) for name in names])
        run = torch.func.vmap(lambda tensors, inputs: network.runner.run(tensors, inputs, training=False, fixed={}))
        with torch.no_grad():
            out = run(self._stack(names, room), network.input(x.to(network.device)))
        return {name: out[at, : len(groups[name]), : network.tasks[name].classes] for at, name in enumerate(names)}

    def _stack(self, names: tuple[str, ...], room: int) -> dict[str, Tensor]:
        found = self._stacks.get(names)
        if found is None:
            found = self._stacked(names)
            while self._stacks and sum(map(len, self._stacks)) + len(names) > room:
                self._stacks.popitem(last=False)
            self._stacks[names] = found
        self._stacks.move_to_end(names)
        return found

    def _stacked(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        network = self.network
        tensors = [network.tensors(name) for name in names]
        heads = {f"{network.partition.head}.weight", f"{network.partition.head}.bias"}
        stacked = {}
        for name in tensors[0]:
            pieces = [found[name] for found in tensors]
            if name in heads:  # the outputs that a task does not have are left out at the end
                most = max(map(len, pieces))
                pieces = [_longer(piece, most) for piece in pieces]
            stacked[name] = torch.stack(pieces)
        return stacked


def _longer(x: Tensor, rows: int) -> Tensor:
    """With rows of zeros up to so many."""
    return x if len(x) == rows else pad(x, [0, 0] * (x.ndim - 1) + [0, rows - len(x)])
