"""Sums per channel over all programs of a launch, in one order, without a second launch."""

from __future__ import annotations

import triton.language as tl

from exssnet.core.jit_triton import jit

AT_ONCE = tl.constexpr(32)  # programs whose parts are added at a time


@jit
def add_up(
    one: tl.tensor, two: tl.tensor, parts: tl.tensor, finished: tl.tensor, sums: tl.tensor, program: tl.tensor,
    programs: tl.tensor, channel: tl.tensor, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """sums[0, channel] = Σ one and sums[1, channel] = Σ two over the programs.

    Every program leaves its part in `parts` [programs, 2, CHANNELS]; the one that finds itself the last, by the counter
    `finished`, adds all of them up from the first to the last, and sets the counter back to zero.
    """
    inside = channel < CHANNELS
    tl.store(parts + program * 2 * CHANNELS + channel, one, mask=inside)
    tl.store(parts + (program * 2 + 1) * CHANNELS + channel, two, mask=inside)
    tl.debug_barrier()  # all of this program's part is written before it is counted
    if tl.atomic_add(finished, 1, sem="acq_rel") == programs - 1:
        total_one, total_two = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        for begin in range(0, programs, AT_ONCE):
            other = begin + tl.arange(0, AT_ONCE)
            there = (other < programs)[:, None] & inside[None, :]
            at = parts + other[:, None] * 2 * CHANNELS + channel[None, :]
            total_one += tl.sum(tl.load(at, mask=there, other=0.0, cache_modifier=".cg"), 0)
            total_two += tl.sum(tl.load(at + CHANNELS, mask=there, other=0.0, cache_modifier=".cg"), 0)
        tl.store(sums + channel, total_one, mask=inside)
        tl.store(sums + CHANNELS + channel, total_two, mask=inside)
        tl.store(finished, 0)
