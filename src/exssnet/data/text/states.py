"""Token states as examples: a padded tensor [tokens, width + 1] each, whose last channel says where a token is."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from exssnet.data.text.by_length import ByLength
from exssnet.encoders.states import States

MULTIPLE = 8  # tokens: lengths on a GPU are rounded up to it


class StatesData(ByLength):
    """Rows of token states under a task's labels, the shortest first.

    On a CPU a batch is as long as its longest text. On a GPU, where steps are captured for fixed shapes, every batch of
    a task is as long as the task's longest text, and the states are held there end to end, without padding.
    """

    capturable = True

    def __init__(
        self, states: States, rows: Tensor, labels: Tensor, classes: int, most_tokens: int, packed: Tensor | None = None
    ) -> None:  # fmt: skip
        """`rows` and `labels` go together, in any order; `packed` are the states of sorted rows on a device."""
        super().__init__(torch.from_numpy(states.lengths)[rows.cpu()], rows, labels, classes)
        self.shape = (most_tokens, states.width + 1)
        self._states, self._packed = states, packed
        # several runs on a GPU read the one copy there, as long as one of them does
        self._copies: WeakValueDictionary[torch.device, StatesData] = WeakValueDictionary()
        if packed is not None:
            longest = int(self.lengths[-1]) if len(self.lengths) else 1
            self._tokens = min(max(-(-longest // MULTIPLE) * MULTIPLE, MULTIPLE), most_tokens)
            self._lengths = self.lengths.to(packed.device)
            self._starts = self._lengths.cumsum(0) - self._lengths

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        if self._packed is not None:
            return self._gathered(self._packed, index, self._tokens).float(), self.labels[index]
        longest = int(self.lengths[index].max()) if len(index) else 0
        return self._copied(index, max(longest, 1), torch.float32), self.labels[index]

    def examples(self, index: Tensor) -> Tensor:
        """In fp16 and as long as a text can be, so that memories hold those of all tasks."""
        if self._packed is not None:
            return self._gathered(self._packed, index, self.shape[0])
        return self._copied(index, self.shape[0], torch.float16)

    def shown(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return examples.float()

    def to(self, device: str | torch.device) -> StatesData:
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        there = self._copies.get(device)
        if there is None:
            packed = self.pack().to(device) if device.type != "cpu" else None
            there = StatesData(self._states, self._rows, self.labels.to(device), self.classes, self.shape[0], packed)
            self._copies[device] = there
        return there

    def pack(self) -> Tensor:
        """The states of all rows end to end, fp16 [tokens, width]."""
        parts = [self._states[row] for row in self._rows.tolist()]
        whole = np.concatenate(parts) if parts else np.zeros((0, self.shape[1] - 1), np.float16)
        return torch.from_numpy(np.ascontiguousarray(whole))

    @classmethod
    def joined(cls, parts: Sequence[StatesData], labels: Sequence[Tensor], classes: int) -> StatesData:
        """The examples of several tasks as one, under these labels."""
        states = States.joined([part._states for part in parts])
        starts = np.cumsum([0, *(len(part._states) for part in parts)]).tolist()
        rows = torch.cat([part._rows + start for part, start in zip(parts, starts, strict=False)])
        device = parts[0].device
        one = cls(states, rows, torch.cat([label.cpu() for label in labels]), classes, parts[0].shape[0])
        return one.to(device)

    def _copied(self, index: Tensor, tokens: int, kind: torch.dtype) -> Tensor:
        """The examples at `index`, copied one by one from where they are mapped."""
        x = torch.zeros(len(index), tokens, self.shape[1], dtype=kind)
        for place, row in enumerate(self._rows[index].tolist()):
            states = torch.from_numpy(self._states[row])
            x[place, : len(states), :-1] = states
            x[place, : len(states), -1] = 1
        return x

    def _gathered(self, packed: Tensor, index: Tensor, tokens: int) -> Tensor:
        """The same on a device, without a look at any value."""
        offsets = torch.arange(tokens, device=packed.device)
        present = offsets < self._lengths[index, None]  # [B, tokens]
        where = (self._starts[index, None] + offsets).clamp(max=max(len(packed) - 1, 0))
        states = packed[where] if len(packed) else packed.new_zeros(*where.shape, packed.shape[1])
        padded = states.masked_fill(~present[..., None], 0.0)
        return torch.cat((padded, present.to(packed.dtype)[..., None]), 2)
