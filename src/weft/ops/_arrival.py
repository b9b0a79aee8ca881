"""When a pull of ag_gemm would end on 4 H200s: tiles in their order, rows as engines bring them.

A program multiplies its tiles one after the other, each when its rows have arrived. What a copy
costs, and how fast tiles are, was fitted to readings of m 1024 to 8192 at TP4, one and more chunks,
both blockings of tiles/gemm_sm90.py: 3.4 % off on average (docs/performance/ag_gemm.md). Elsewhere
the numbers differ, and what is compared here are candidates with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from weft.tiles import gemm_sm90, swizzle
from weft.tiles.blocking import Blocking
from weft.tiles.gemm import Shape

# A program's products, by what they reach in wide tiles; other tiles cost TURNS_COST more.
TFLOPS_PER_PROGRAM = 760 / 132
# From the call to the first copy; a copy's start; the word behind it; its rate.
GATE_US, COPY_US, WORD_US, COPY_GBPS = 9.0, 6.0, 1.0, 390.0
# What a shared tile costs beside its products, and the last tile's way out.
SHARE_US, END_US = 3.0, 5.0


@dataclass(frozen=True)
class Pull:
    """What of a call matters here; `rows` of each rank come in `chunks`."""

    m: int
    n: int
    k: int
    rows: int
    num_ranks: int
    chunks: int
    group_m: int
    blocking: Blocking
    num_programs: int

    def end_us(self) -> float:
        """Predicted time of the call, in microseconds."""
        blocking, step = self.blocking, self.num_programs
        extents = (blocking.tile_m, blocking.tile_n, blocking.tile_k)
        dealt = gemm_sm90.cut.fn(Shape(self.m, self.n, self.k, 0, 0, 0), *extents, step)
        tile_us = self._tile_us()
        arrived = self._arrivals(dealt)
        ends = [0.0] * step
        for unit in range(dealt.whole + dealt.shared * dealt.parts):
            tile, cost = unit, tile_us
            if unit >= dealt.whole:
                tile = dealt.whole + (unit - dealt.whole) % dealt.shared
                cost = tile_us / dealt.parts + SHARE_US
            i_m, _ = swizzle.grouped.fn(tile, dealt.num_m, dealt.num_n, (self.group_m,))
            ends[unit % step] = max(ends[unit % step], arrived[i_m]) + cost
        return max(ends) + END_US

    def _tile_us(self) -> float:
        blocking = self.blocking
        flops = 2 * blocking.tile_m * blocking.tile_n * self.k
        slower = 1 if blocking.tile_n > 128 else gemm_sm90.TURNS_COST
        return flops / TFLOPS_PER_PROGRAM * slower / 1e6

    def _arrivals(self, dealt: Any) -> list[float]:
        """When each row of tiles can be multiplied, own rows first."""
        chunk_rows = max(1, ceil(self.rows / self.chunks))
        copy_us = COPY_US + WORD_US + chunk_rows * self.k * 2 / COPY_GBPS / 1e3
        arrived = []
        for i_m in range(dealt.num_m):
            last = min((i_m + 1) * self.blocking.tile_m, self.m) - 1
            hop, row = divmod(last, self.rows)
            copies = (hop - 1) * self.chunks + row // chunk_rows + 1
            arrived.append(GATE_US + copies * copy_us if hop else 0.0)
        return arrived
