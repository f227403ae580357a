"""Code a mask close to its entropy: a range coder with earlier tasks as context.

A mask of n weights at density k takes about n·H(k) bits. If it overlaps with the used weights, or with the lender's
mask that it started from, weights are split into groups by these, and each group has its own probability.

docs/reference/format.md has the format, exact to the bit; `codec_reference.py` decodes it in plain Python. The range
coder is constriction's, with `perfect=False` because its weight of a zero is then one line of arithmetic; the other
choice is a search that uses logarithms. A mask has one encoding of each kind, and `decode` takes no other bytes.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exssnet.errors import DataError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Bools = NDArray[np.bool_]

VERSION = 1
USED, LENDER = 1, 2  # the bits of a context kind, and of a group's number
_LONGEST_COUNT = 9  # bytes of a LEB128 below 2⁶³


class Count(NamedTuple):
    """Number of weights in a group, and of those in the mask."""

    total: int
    ones: int

    @property
    def coded(self) -> bool:
        return 0 < self.ones < self.total

    @property
    def entropy(self) -> float:
        """n·H(k), in bits."""
        if not self.coded:
            return 0.0
        zeros = self.total - self.ones
        return self.ones * log2(self.total / self.ones) + zeros * log2(self.total / zeros)


def encode(mask: Tensor, used: Tensor | None = None, lender: Tensor | None = None) -> bytes:
    """Encode a mask with the contexts that make it smallest; `decode` needs the same used set and lender's mask."""
    bits = _bools(mask, mask.numel(), "the mask")
    known = _known(len(bits), used, lender)
    offered = sum(known)  # the bits
    cells = {
        number: Count(int(np.count_nonzero(group)), int(np.count_nonzero(group & bits)))
        for number, group in zip(_numbers(offered), _groups(offered, len(bits), known), strict=True)
    }
    tables = {kind: _merged(cells, kind) for kind in _numbers(offered)}
    kind = min(
        tables, key=lambda kind: _bound(kind, tables[kind])
    )  # the first of equals, which needs the least context
    symbols = [bits[group].astype(np.int32) for group in _groups(kind, len(bits), known)]
    return _header(kind, tables[kind]) + _words(symbols, tables[kind])


def decode(data: bytes, size: int, used: Tensor | None = None, lender: Tensor | None = None) -> Tensor:
    """Decode a mask (bool [size]); bytes that `encode` does not write are a DataError."""
    import torch

    known = _known(size, used, lender)
    kind = _kind(data)
    for bit, name in ((USED, "the used set"), (LENDER, "the lender's mask")):
        if kind & bit and bit not in known:
            raise DataError(f"a stored mask needs {name}, which is missing: read the earlier tasks first")
    groups = _groups(kind, size, known)
    counts, start = _counts(data, [int(np.count_nonzero(group)) for group in groups])
    symbols = _symbols(data[start:], counts)

    mask = np.zeros(size, dtype=np.bool_)
    for group, values in zip(groups, symbols, strict=True):
        mask[group] = values
    return torch.from_numpy(mask)


# --- groups ------------------------------------------------------------------------------------------------


def _bools(vector: Tensor, size: int, name: str) -> Bools:
    array: NDArray[np.bool_] = vector.detach().cpu().numpy()
    if array.dtype != np.bool_ or array.shape != (size,):
        raise InputError(f"{name} must be {size} bools, not {vector.dtype} of shape {tuple(vector.shape)}")
    return array


def _known(size: int, used: Tensor | None, lender: Tensor | None) -> dict[int, Bools]:
    """Possible contexts by their bits."""
    named = ((USED, used, "the used set"), (LENDER, lender, "the lender's mask"))
    return {bit: _bools(vector, size, name) for bit, vector, name in named if vector is not None}


def _numbers(kind: int) -> list[int]:
    """The groups of a kind; also the kinds whose bits are a subset of its bits."""
    return [number for number in range(4) if number | kind == kind]


def _groups(kind: int, size: int, known: dict[int, Bools]) -> list[Bools]:
    """Per group of the kind, which weights are in it."""
    groups = [np.ones(size, dtype=np.bool_)]
    for bit in (USED, LENDER):
        if kind & bit:
            groups = [group & ~known[bit] for group in groups] + [group & known[bit] for group in groups]
    return groups


def _merged(cells: dict[int, Count], kind: int) -> list[Count]:
    """The counts of a kind with fewer groups."""
    return [
        Count(*map(sum, zip(*(count for cell, count in cells.items() if cell & kind == number), strict=True)))
        for number in _numbers(kind)
    ]


def _bound(kind: int, counts: list[Count]) -> int:
    """Bounds of the size in bytes: lower without a context, upper with one, so that a context never costs bytes.

    The precision of its range costs the coder about 1.3e-4 bits per weight.
    """
    bits = sum(count.entropy for count in counts)
    if kind and bits:
        bits += 1 + sum(count.total for count in counts) / 4096
    return len(_header(kind, counts)) + 4 * ceil(bits / 32)


# --- bytes -------------------------------------------------------------------------------------------------


def _damaged(what: str) -> DataError:
    return DataError(f"a stored mask is damaged: {what}; copy the model directory again from its source")


def _header(kind: int, counts: list[Count]) -> bytes:
    return bytes([VERSION, kind]) + b"".join(_leb128(count.ones) for count in counts)


def _leb128(value: int) -> bytes:
    """LEB128: seven bits per byte, lowest first; the high bit means that more follow."""
    low, high = value & 0x7F, value >> 7
    return bytes([low]) if not high else bytes([low | 0x80]) + _leb128(high)


def _kind(data: bytes) -> int:
    if len(data) < 2:
        raise _damaged(f"it has {len(data)} bytes, fewer than any mask")
    version, kind = data[0], data[1]
    if version != VERSION:
        raise DataError(
            f"a stored mask has version {version}, this version of exssnet reads {VERSION}: upgrade exssnet"
        )
    if kind > USED | LENDER:
        raise _damaged(f"its context kind is {kind}, of 0 to {USED | LENDER}")
    return kind


def _counts(data: bytes, totals: list[int]) -> tuple[list[Count], int]:
    """The counts of the header, and the offset of the words."""
    counts, at = [], 2
    for total in totals:
        end = next((i + 1 for i in range(at, min(at + _LONGEST_COUNT, len(data))) if data[i] < 0x80), None)
        if end is None:
            raise _damaged("its header ends within a count")
        ones = sum((byte & 0x7F) << (7 * position) for position, byte in enumerate(data[at:end]))
        if ones > total:
            raise _damaged(f"it counts {ones} ones among {total} weights")
        if data[at:end] != _leb128(ones):
            raise _damaged(f"it writes the count {ones} in {end - at} bytes")
        counts.append(Count(total, ones))
        at = end
    return counts, at


def _model(count: Count) -> Any:
    from constriction import stream

    return stream.model.Bernoulli(count.ones / count.total, perfect=False)


def _words(symbols: list[NDArray[np.int32]], counts: list[Count]) -> bytes:
    from constriction import stream

    encoder = stream.queue.RangeEncoder()
    for values, count in zip(symbols, counts, strict=True):
        if count.coded:
            encoder.encode(values, _model(count))
    moved, _ = encoder.pos()  # number of words by which the range was shifted
    words: NDArray[np.uint32] = encoder.get_compressed()
    return words[: moved + 1].astype("<u4").tobytes()


def _symbols(words: bytes, counts: list[Count]) -> list[NDArray[np.int32]]:
    """Decode zeros and ones per group; other words than the encoder's are refused."""
    from constriction import stream

    if len(words) % 4:
        raise _damaged(f"{len(words)} bytes follow its header, not a multiple of 4")
    decoder = stream.queue.RangeDecoder(np.frombuffer(words, dtype="<u4").astype(np.uint32))
    symbols: list[NDArray[np.int32]] = []
    for count in counts:
        if count.coded:
            try:
                values = decoder.decode(_model(count), count.total)
            except AssertionError as error:  # constriction's error for words that no encoder writes
                raise _damaged("its words are not a code") from error
        else:
            values = np.full(count.total, bool(count.ones), dtype=np.int32)
        if (found := np.count_nonzero(values)) != count.ones:
            raise _damaged(f"it has {found} ones where it counts {count.ones}")
        symbols.append(values)
    # a decoder continues with zeros after its data: lost or added words may leave the counts right
    if _words(symbols, counts) != words:
        raise _damaged(f"{len(words)} bytes follow its header, not those of its mask")
    return symbols
