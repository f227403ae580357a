"""A batch whose rows are of different tasks, computed at once.

The tasks' weights are stacked and the network runs on all of them in one go (`vmap`): for small layers, where a call
costs more than its products, that is several times faster than one task after the other. With convolutions it gains
little, and only while all tasks have equally few rows: filling them up costs more (`benchmarks/store.py`). So networks
with any go task by task, and so do modules that `vmap` cannot run.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from exssnet.core.inputs import check_input
from exssnet.core.network import LearnedTask, MaskedNetwork

STACKED_BYTES = 256 * 2**20  # of stacked weights, at most
FEW_ROWS = 64  # with more of a task the products cost more than the call, and padding the others would cost most
LONGEST = 500  # rows run at once
NO_RULE = "There is a performance drop"  # vmap's, of an operator that it runs task by task: no gain

Stack = tuple[list[LearnedTask], dict[str, Tensor]]  # of which tasks, and their tensors


class Stacked:
    """Runs batches of several tasks on a network; keeps the stacks it used last."""

    def __init__(self, network: MaskedNetwork) -> None:
        self.network = network
        self._stacks: OrderedDict[tuple[str, ...], Stack] = OrderedDict()
        parts = network.structure.skeleton.modules()
        self._stackable = not any(isinstance(part, nn.modules.conv._ConvNd) for part in parts)

    @property
    def _room(self) -> int:
        """How many tasks' weights may be stacked."""
        return STACKED_BYTES // (self.network.layout.size * self.network.weights.element_size())

    def logits(self, groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per task the outputs [rows, classes] for its inputs [rows, ...]."""
        few = {name: x for name, x in groups.items() if len(x) <= FEW_ROWS}
        alike = len({(x.shape[1:], x.dtype) for x in few.values()}) == 1
        if not (self._stackable and alike and 1 < len(few) <= self._room):
            return self._one_by_one(groups)
        try:
            found = self._at_once(few)
        except (RuntimeError, UserWarning):  # inputs that do not fit: told below; or what vmap cannot do
            found = self._one_by_one(few)
            self._stackable = False
        return found | self._one_by_one({name: x for name, x in groups.items() if name not in few})

    def classes(self, x: Tensor, rows: Mapping[str, list[int]]) -> Tensor:
        """The most likely class of every input [N]; `rows` says which of them are whose."""
        found = torch.empty(len(x), dtype=torch.int64, device=self.network.device)
        most = max(map(len, rows.values()), default=0)
        if self._stackable and len(rows) > 1 and most <= FEW_ROWS and len(rows) <= self._room:
            names = tuple(sorted(rows))
            index = torch.tensor([rows[name] + rows[name][:1] * (most - len(rows[name])) for name in names])
            try:
                out = self._run(names, x[index])
            except (RuntimeError, UserWarning):
                pass  # inputs that do not fit, or what vmap cannot do: `logits` finds out
            else:
                counts = torch.tensor([self.network.tasks[name].classes for name in names], device=out.device)
                missing = torch.arange(out.shape[2], device=out.device) >= counts[:, None, None]
                found[index.to(found.device)] = out.masked_fill(missing, -torch.inf).argmax(2)
                return found
        for name, logits in self.logits({name: x[index] for name, index in rows.items()}).items():
            found[torch.tensor(rows[name], device=found.device)] = logits.argmax(1)
        return found

    def _one_by_one(self, groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        network, found = self.network, {}
        for name, x in groups.items():
            x = x.to(network.device)
            try:
                found[name] = torch.cat([network.logits(part, name) for part in torch.split(x, LONGEST)])
            except (RuntimeError, IndexError, TypeError, ValueError):
                check_input(network, x[:1], network.task(name).classes)  # inputs that do not fit get their one line
                raise
        return found

    def _at_once(self, groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        network, names = self.network, tuple(sorted(groups))
        rows = max(map(len, groups.values()))
        out = self._run(names, torch.stack([_longer(groups[name], rows) for name in names]))
        return {name: out[at, : len(groups[name]), : network.tasks[name].classes] for at, name in enumerate(names)}

    def _run(self, names: tuple[str, ...], x: Tensor) -> Tensor:
        """Outputs [tasks, rows, classes] for inputs [tasks, rows, ...]."""
        network = self.network
        run = torch.func.vmap(
            lambda tensors, inputs: network.runner.run(tensors, inputs, training=False, moving=tensors)
        )
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", NO_RULE)
            out: Tensor = run(self._stack(names), network.input(x.to(network.device)))
        return out

    def _stack(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        with self.network.lock:
            tasks = [self.network.task(name) for name in names]
            known, found = self._stacks.pop(names, ([], {}))
            if not all(one is other for one, other in zip_longest(known, tasks)):  # a name may be learned again
                found = self._stacked(names)
                while self._stacks and sum(map(len, self._stacks)) + len(names) > self._room:
                    self._stacks.popitem(last=False)
            self._stacks[names] = tasks, found
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
    """Padded with rows of zeros."""
    return x if len(x) == rows else pad(x, [0, 0] * (x.ndim - 1) + [0, rows - len(x)])
