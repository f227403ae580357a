"""What an encoder is: texts in, one matrix of token states each out, the same every time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Text = str | tuple[str, str]  # one text, or a pair that is encoded as a pair
TokenStates = NDArray[np.float16]  # [tokens, width]

MOST_TOKENS = 256
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Encoded:
    """Token states of some texts, in their order; real lengths, no padding."""

    states: list[TokenStates]
    cut: int  # texts with more tokens than the encoder takes


class Encoder(ABC):
    """Frozen: what it makes of a text never changes. It trains nothing and draws nothing."""

    name: str  # what loads it again on a machine that has it
    width: int
    limit: int  # tokens of a text, at most

    @property
    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of all that decides the token states: weights, tokenizer, layer, limit. Loads no weights."""

    @abstractmethod
    def encode(self, texts: Sequence[Text]) -> Encoded:
        """The token states of these texts. A text of no tokens has none."""


def as_states(values: NDArray[np.floating]) -> TokenStates:
    """In fp16; what it cannot hold is as large as it can hold."""
    clipped: TokenStates = np.clip(values, -LARGEST, LARGEST).astype(np.float16)
    return clipped


def digest_of(*parts: str | int) -> str:
    """SHA-256 of a few facts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
