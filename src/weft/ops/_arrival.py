"""When a call of ag_gemm would end on 4 H200s: tiles in their order, rows as they arrive.

A program multiplies its tiles one after the other, each when its rows have arrived; and all of B is
read from memory once for each group of rows of tiles. What copies cost, and how fast tiles are, was
fitted to 100 readings of m 256 to 8192 at TP4, by both transports and both blockings of
tiles/gemm_sm90.py: 5 % off on average (docs/performance/ag_gemm.md). Elsewhere the numbers differ,
and what is compared here are candidates with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from weft.tiles import gemm_sm90, swizzle
from weft.tiles.blocking import Blocking

# A program's products, by what they reach in wide tiles; other tiles cost TURNS_COST more.
TFLOPS_PER_PROGRAM = 783 / 132
# Pull: from the call to the first copy; a copy's start; the word behind it; its rate.
GATE_US, COPY_US, WORD_US, COPY_GBPS = 20.0, 3.0, 1.0, 390.0
# Put: as pull, without staging and without meeting.
PUT_GATE_US = 12.0
# Push: a launch before the product, and all its stores' rate.
PUSH_US, PUSH_GBPS = 1.5, 300.0
# What a shared tile costs beside its products, and the last tile's way out.
SHARE_US, END_US = 3.0, 12.0
# Reading B again and again; one that is smaller stays in L2.
MEMORY_GBPS, CACHED_BYTES = 3800.0, 30e6
# The plain template at decode sizes: reading B, and all else. By packets.
SMALL_GBPS, SMALL_US = 3300.0, 15.0
FEW_GBPS, FEW_US = 4000.0, 9.0
# cuBLAS: products, B, all else. NCCL's all-gather by bytes of a rank. What both cost the host.
CUBLAS_TFLOPS, CUBLAS_GBPS, CUBLAS_US = 740.0, 4000.0, 7.0
NCCL_US = ((0, 10.0), (64 << 10, 10.5), (256 << 10, 13.9), (1 << 20, 36.8), (4 << 20, 66.0),
           (16 << 20, 188.0), (64 << 20, 660.0), (128 << 20, 1270.0))  # fmt: skip
UNFUSED_HOST_US = 100.0


def small_us(n: int, k: int) -> float:
    """The plain template's push of a few rows."""
    return n * k * 2 / SMALL_GBPS / 1e3 + SMALL_US


def few_us(n: int, k: int) -> float:
    """Packets of a few rows, under one launch."""
    return n * k * 2 / FEW_GBPS / 1e3 + FEW_US


def unfused_us(m: int, n: int, k: int, num_ranks: int, is_recorded: bool) -> float:
    """NCCL, then cuBLAS: what their launches cost the host shows unless they are recorded."""
    product = max(2 * m * n * k / CUBLAS_TFLOPS, n * k * 2 * 1e3 / CUBLAS_GBPS) / 1e6
    shard_bytes = ceil(m / num_ranks) * k * 2
    gather = NCCL_US[-1][1] * shard_bytes / NCCL_US[-1][0]
    for (low, low_us), (high, high_us) in pairwise(NCCL_US):
        if low <= shard_bytes < high:
            gather = low_us + (high_us - low_us) * (shard_bytes - low) / (high - low)
    end_us = product + CUBLAS_US + gather
    return end_us if is_recorded else max(end_us, UNFUSED_HOST_US)


@dataclass(frozen=True)
class Plan:
    """What of a call matters here: 16-bit operands, m rows over all ranks, split as `shards`
    (a Shards of _ag_gemm_config.py) tells the kernels."""

    m: int
    n: int
    k: int
    num_ranks: int
    transport: str
    shards: Any
    blocking: Blocking
    num_programs: int

    def end_us(self) -> float:
        """Predicted time of the call, in microseconds."""
        step = self.num_programs
        dealt = gemm_sm90.deal(self.m, self.n, self.k, self.blocking, step)
        tile_us = self._tile_us()
        arrived = self._arrivals(dealt.num_m)
        order = (self.shards.group_m, 0, self.shards.head)
        ends = [0.0] * step
        for program in range(step):
            for tile, begin, end in gemm_sm90.units(program, dealt, step):
                share = (end - begin) / dealt.num_k
                cost = tile_us if share == 1 else tile_us * share + SHARE_US
                i_m, _ = swizzle.rotated.fn(tile, dealt.num_m, dealt.num_n, order)
                ends[program] = max(ends[program], arrived[i_m]) + cost
        return max(*ends, arrived[0] + self._memory_us(dealt)) + END_US

    def _tile_us(self) -> float:
        blocking = self.blocking
        flops = 2 * blocking.tile_m * blocking.tile_n * self.k
        slower = 1 if blocking.tile_n > 128 else gemm_sm90.TURNS_COST
        return flops / TFLOPS_PER_PROGRAM * slower / 1e6

    def _memory_us(self, dealt: Any) -> float:
        b_bytes = self.n * self.k * 2
        head, group_m = self.shards.head, self.shards.group_m
        times = ceil(head / group_m) + ceil((dealt.num_m - head) / group_m)
        return b_bytes * (times if b_bytes > CACHED_BYTES else 1) / MEMORY_GBPS / 1e3

    def _arrivals(self, num_m: int) -> list[float]:
        """When each row of tiles can be multiplied, own rows first."""
        row_bytes = self.k * 2
        rows, chunk_rows = self.shards.rows, self.shards.chunk_rows
        pushed_us = PUSH_US + rows * row_bytes * (self.num_ranks - 1) / PUSH_GBPS / 1e3
        copy_us = COPY_US + WORD_US + chunk_rows * row_bytes / COPY_GBPS / 1e3
        arrived = []
        for i_m in range(num_m):
            hop, row = divmod(min((i_m + 1) * self.blocking.tile_m, self.m) - 1, rows)
            copies = (hop - 1) * self.shards.chunks + row // chunk_rows + 1
            if self.transport == "push":
                arrived.append(pushed_us)
            else:
                gate = GATE_US if self.transport == "pull" else PUT_GATE_US
                arrived.append(gate + copies * copy_us if hop else 0.0)
        return arrived
