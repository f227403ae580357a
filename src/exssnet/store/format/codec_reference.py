"""Decode masks of docs/reference/format.md in plain Python: the oracle for tests of `codec.py`.

It needs no package and trusts its data; `codec.decode` also refuses bytes that no encoder writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

USED, LENDER = 1, 2  # the bits of the context kind, byte 1, and of a group's number


def decode(data: bytes, size: int, used: Sequence[bool] = (), lender: Sequence[bool] = ()) -> list[bool]:
    """Decode a mask of `size` weights; the context kind says whether the used set and the lender's mask are needed."""
    version, kind = data[0], data[1]
    if version != 1:
        raise ValueError(f"a mask of version {version}; this is a decoder of version 1")
    group = [0] * size  # of every weight
    for bit, known in ((USED, used), (LENDER, lender)):
        if kind & bit:
            group = [number | bit * bool(inside) for number, inside in zip(group, known, strict=True)]

    rest = iter(data[2:])
    numbers = [number for number in range(4) if number | kind == kind]
    counts = [(group.count(number), leb128(rest)) for number in numbers]
    bits = range_decoder(words(bytes(rest)), counts)
    mask = [False] * size
    for position in sorted(range(size), key=group.__getitem__):  # group by group, in order within each
        mask[position] = next(bits)
    return mask


def leb128(data: Iterator[int]) -> int:
    """LEB128: seven bits per byte, lowest first; the high bit means that more follow."""
    byte = next(data)
    return byte if byte < 128 else byte - 128 + 128 * leb128(data)


def words(data: bytes) -> Iterator[int]:
    """32 bits each, little-endian; zeros after the end."""
    for at in range(0, len(data), 4):
        yield int.from_bytes(data[at : at + 4], "little")
    while True:
        yield 0


def range_decoder(words: Iterator[int], counts: Sequence[tuple[int, int]]) -> Iterator[bool]:
    """Decode the bits of all groups in sequence; `counts` has the size and the ones of each."""
    r, d = 2**64 - 1, next(words) << 32 | next(words)  # the width of the range, and the position of the data in it
    for total, ones in counts:
        if ones in (0, total):  # nothing was coded
            yield from [ones > 0] * total
            continue
        # weight of a zero, of 2²⁴. In doubles on purpose: exact arithmetic differs by one for some counts
        z = int((1 - ones / total) * (2**24 - 2)) + 1
        for _ in range(total):
            s = r >> 24
            one = d >= s * z
            d, r = (d - s * z, s * (2**24 - z)) if one else (d, s * z)
            if r < 2**32:
                d, r = d << 32 | next(words), r << 32
            yield one
