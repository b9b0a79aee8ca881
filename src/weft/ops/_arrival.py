"""When a call of ag_gemm would end on 4 H200s: tiles in their order, rows as they arrive.

A program multiplies its tiles one after the other, each when its rows have arrived; and all of B is
read from memory once for each group of rows of tiles. What copies cost, and how fast tiles are, was
fitted to readings of m 1024 to 8192 at TP4, one and more chunks, both blockings of
tiles/gemm_sm90.py: 3.4 % off on average (docs/performance/ag_gemm.md). Elsewhere the numbers
differ, and what is compared here are candidates with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from weft.tiles import gemm_sm90, swizzle
from weft.tiles.blocking import Blocking

# A program's products, by what they reach in wide tiles; other tiles cost TURNS_COST more.
TFLOPS_PER_PROGRAM = 760 / 132
# Pull: from the call to the first copy; a copy's start; the word behind it; its rate.
GATE_US, COPY_US, WORD_US, COPY_GBPS = 9.0, 6.0, 1.0, 390.0
# Push: a launch before the product, the way of its signals, all its stores' rate.
PUSH_US, SIGNAL_US, PUSH_GBPS = 4.0, 4.0, 300.0
# What a shared tile costs beside its products, and the last tile's way out.
SHARE_US, END_US = 3.0, 5.0
# Reading B again and again; one that is smaller stays in L2.
MEMORY_GBPS, CACHED_BYTES = 4000.0, 30e6


@dataclass(frozen=True)
class Plan:
    """What of a call matters here: 16-bit operands, m rows over all ranks."""

    m: int
    n: int
    k: int
    num_ranks: int
    transport: str
    chunks: int
    group_m: int
    blocking: Blocking
    num_programs: int

    @property
    def rows(self) -> int:
        return ceil(self.m / self.num_ranks)

    @property
    def head(self) -> int:
        """Rows of tiles that need no other rank's."""
        return max(1, min(self.rows // self.blocking.tile_m, ceil(self.m / self.blocking.tile_m)))

    def end_us(self) -> float:
        """Predicted time of the call, in microseconds."""
        step = self.num_programs
        dealt = gemm_sm90.deal(self.m, self.n, self.k, self.blocking, step)
        tile_us = self._tile_us()
        arrived = self._arrivals(dealt.num_m)
        order = (self.group_m, 0, self.head)
        ends = [0.0] * step
        for unit in range(dealt.whole + dealt.shared * dealt.parts):
            tile, cost = unit, tile_us
            if unit >= dealt.whole:
                tile = dealt.whole + (unit - dealt.whole) % dealt.shared
                cost = tile_us / dealt.parts + SHARE_US
            i_m, _ = swizzle.rotated.fn(tile, dealt.num_m, dealt.num_n, order)
            ends[unit % step] = max(ends[unit % step], arrived[i_m]) + cost
        return max(*ends, arrived[0] + self._memory_us(dealt)) + END_US

    def _tile_us(self) -> float:
        blocking = self.blocking
        flops = 2 * blocking.tile_m * blocking.tile_n * self.k
        slower = 1 if blocking.tile_n > 128 else gemm_sm90.TURNS_COST
        return flops / TFLOPS_PER_PROGRAM * slower / 1e6

    def _memory_us(self, dealt: Any) -> float:
        b_bytes = self.n * self.k * 2
        times = ceil(self.head / self.group_m) + ceil((dealt.num_m - self.head) / self.group_m)
        return b_bytes * (times if b_bytes > CACHED_BYTES else 1) / MEMORY_GBPS / 1e3

    def _arrivals(self, num_m: int) -> list[float]:
        """When each row of tiles can be multiplied, own rows first."""
        row_bytes = self.k * 2
        chunk_rows = max(1, ceil(self.rows / self.chunks))
        pushed_us = PUSH_US + self.rows * row_bytes * (self.num_ranks - 1) / PUSH_GBPS / 1e3
        copy_us = COPY_US + WORD_US + chunk_rows * row_bytes / COPY_GBPS / 1e3
        arrived = []
        for i_m in range(num_m):
            hop, row = divmod(min((i_m + 1) * self.blocking.tile_m, self.m) - 1, self.rows)
            copies = (hop - 1) * self.chunks + row // chunk_rows + 1
            if self.transport == "push":
                arrived.append(pushed_us + min(hop, 1) * SIGNAL_US)
            else:
                arrived.append(GATE_US + copies * copy_us if hop else 0.0)
        return arrived
