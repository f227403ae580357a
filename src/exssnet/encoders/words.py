"""Encoders that know words one by one: GloVe and fastText files, and random vectors.

Tokens are found by one rule, `tokens`: the text is normalised (Unicode NFC), then every run of letters, digits and
underscores is a token, and so is every other sign that is not a space. In Chinese and Japanese, which write no spaces,
every character is a token. A word is looked up as it is written, then in lower case. A word without a vector has a
random one, drawn from its name, so that it is the same word wherever it occurs.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from exssnet.encoders.base import MOST_TOKENS, Encoded, Encoder, Text, as_states, digest_of
from exssnet.errors import InputError

Vector = NDArray[np.float32]

IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
TOKEN = re.compile(rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s]")
SEPARATOR = "[SEP]"  # between the texts of a pair; no token of a text is called so
RANDOM_WIDTH = 100  # that of the usual word vectors
MOST_WIDTH = 4096
RULES = 1  # raise when texts would give other tokens or vectors


def tokens(text: Text) -> list[str]:
    """The tokens of a text; of a pair those of both, with a separator between them."""
    if isinstance(text, tuple):
        return [*tokens(text[0]), SEPARATOR, *tokens(text[1])]
    return TOKEN.findall(unicodedata.normalize("NFC", text))


class WordEncoder(Encoder):
    """Looks every token up."""

    limit = MOST_TOKENS

    def encode(self, texts: Sequence[Text]) -> Encoded:
        found = [tokens(text) for text in texts]
        cut = sum(len(words) > self.limit for words in found)
        return Encoded([self._states(words[: self.limit]) for words in found], cut)

    def _states(self, words: list[str]) -> NDArray[np.float16]:
        if not words:
            return np.zeros((0, self.width), np.float16)
        return as_states(np.stack([self.vector(word) for word in words]))

    @abstractmethod
    def vector(self, word: str) -> Vector:
        """The vector of a token."""


class RandomEncoder(WordEncoder):
    """A random vector for every word, from a seed: needs no file, and knows every language."""

    def __init__(self, width: int = RANDOM_WIDTH, seed: int = 0, limit: int = MOST_TOKENS) -> None:
        if not 1 <= width <= MOST_WIDTH:
            raise InputError(f"a random embedding cannot have {width} dimensions: give 1 to {MOST_WIDTH}")
        self.name, self.width, self.seed, self.limit = f"random:{width}:{seed}", width, seed, limit
        self._drawn = lru_cache(2**16)(self._draw)

    @property
    def digest(self) -> str:
        return digest_of("random", RULES, self.width, self.seed, self.limit)

    def vector(self, word: str) -> Vector:
        return self._drawn(word.lower())

    def _draw(self, word: str) -> Vector:
        return drawn(word, self.width, self.seed)


class WordVectors(WordEncoder):
    """The vectors of a table, one row a word."""

    def __init__(self, name: str, digest: str, words: dict[str, int], table: Vector, limit: int = MOST_TOKENS) -> None:
        self.name, self.limit = name, limit
        self.width = table.shape[1]
        self._file, self._words, self._table = digest, words, table
        self._deviation = float(table.std()) or 1.0
        self._drawn = lru_cache(2**16)(self._draw)

    @property
    def digest(self) -> str:
        return digest_of("word vectors", RULES, self._file, self.limit)

    def vector(self, word: str) -> Vector:
        row = self._words.get(word)
        if row is None:
            row = self._words.get(word.lower())
        return self._drawn(word.lower()) if row is None else self._table[row]

    def _draw(self, word: str) -> Vector:
        return drawn(word, self.width, 0) * np.float32(self._deviation)


def drawn(word: str, width: int, seed: int) -> Vector:
    """A vector of independent normal numbers that follows from the word and the seed."""
    key = hashlib.sha256(f"{seed}\n{word}".encode("utf-8", "surrogatepass")).digest()
    draw = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return draw.standard_normal(width, np.float32)
