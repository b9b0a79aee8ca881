"""Own rows go to all ranks before the product, by the programs that have the fewest tiles."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments

# Elements that a program has under way at once.
FED = tl.constexpr(16384)


@triton.jit
def feed(x, gathered, to, lane, rank, k, experts, world):
    """Every lanes-th block of own tokens -> where they belong among all of rank `to`'s."""
    k = fragments.aligned(k)
    own = tl.minimum(tl.maximum(experts.m - rank * experts.rows, 0), experts.rows)
    size = own.to(tl.int64) * k
    there = gathered + (rank * experts.rows).to(tl.int64) * k
    for start in range(lane * FED, size, experts.lanes * FED):
        i = start + fragments.line_index(FED)
        wl.put(world, there + i, x + i, to=to, mask=i < size)
