"""Token ids as examples, for methods that train the encoder itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exssnet.data.text.by_length import ByLength

ABSENT = -1  # the id behind a text


class TokenData(ByLength):
    """An input is int64 [tokens, 2]: ids, -1 behind the text, and token types, which tell the texts of a pair apart.

    A batch is as long as its longest text, so a step is not captured on a GPU.
    """

    def __init__(self, tokens: Sequence[Tensor], labels: Tensor, classes: int, most_tokens: int) -> None:
        """`tokens` are int64 [length, 2] of each text."""
        lengths = torch.tensor([len(one) for one in tokens], dtype=torch.int64)
        super().__init__(lengths, torch.arange(len(tokens)), labels, classes)
        self.shape = (most_tokens, 2)
        self._tokens = tokens

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        longest = int(self.lengths[index.cpu()].max()) if len(index) else 0
        return self._padded(index, max(longest, 1)), self.labels[index]

    def examples(self, index: Tensor) -> Tensor:
        """As long as a text can be, so that memories hold those of all tasks."""
        return self._padded(index, self.shape[0])

    def shown(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As long as the longest of them."""
        longest = int((examples[..., 0] != ABSENT).sum(1).max()) if len(examples) else 0
        return examples[:, : max(longest, 1)]

    def to(self, device: str | torch.device) -> TokenData:
        moved = TokenData.__new__(TokenData)
        moved.__dict__.update(self.__dict__, labels=self.labels.to(device))
        return moved

    def _padded(self, index: Tensor, tokens: int) -> Tensor:
        x = torch.zeros(len(index), tokens, 2, dtype=torch.int64)
        x[..., 0] = ABSENT
        for place, row in enumerate(self._rows[index.cpu()].tolist()):
            x[place, : len(self._tokens[row])] = self._tokens[row]
        return x.to(self.device)


def as_model_input(x: Tensor, padding: int = 0) -> dict[str, Tensor]:
    """What a transformer takes: ids, attention mask and token types. `padding` is the id behind a text."""
    present = x[..., 0] != ABSENT
    return {
        "input_ids": x[..., 0].masked_fill(~present, padding),
        "attention_mask": present.long(),
        "token_type_ids": x[..., 1],
    }
