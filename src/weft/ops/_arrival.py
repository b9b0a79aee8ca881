"""When a call of ag_gemm would end on 4 H200s, by the compiler's model (weft.compiler.cost).

Fitted to 100 readings of m 256 to 8192 at TP4, by both transports and both blockings of
tiles/gemm_sm90.py: 5 % off on average (docs/performance/ag_gemm.md). Elsewhere the numbers differ,
and what is compared here are candidates with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.compiler.cost import products
from weft.compiler.cost.machine import H200X4
from weft.compiler.cost.products import Product
from weft.tiles.blocking import Blocking

# A transport of ag_gemm, and what carries the rows by the model's words.
ENGINES = {"pull": "copy_engine", "put": "copy_engine_put", "push": "push"}
TILE = (128, 256, 64)


def small_us(n: int, k: int) -> float:
    """The plain template's push of a few rows."""
    return products.few_rows_us(Product(1, n, k, 1, TILE), H200X4, by_packets=False)


def few_us(m: int, n: int, k: int) -> float:
    """Packets of a few rows, under one launch."""
    return products.few_rows_us(Product(m, n, k, 1, TILE), H200X4, by_packets=True)


def unfused_us(m: int, n: int, k: int, num_ranks: int, is_recorded: bool) -> float:
    """NCCL, then cuBLAS: what their launches cost the host shows unless they are recorded."""
    product = Product(m, n, k, num_ranks, TILE)
    end_us = products.library_product_us(product, H200X4)
    end_us += products.library_collective_us(product, H200X4, "all_gather")
    return end_us if is_recorded else max(end_us, H200X4.library_host_us)


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
    early_parts: int = 1

    def end_us(self) -> float:
        """Predicted time of the call, in microseconds: rows are read in place."""
        tile = (self.blocking.tile_m, self.blocking.tile_n, self.blocking.tile_k)
        product = Product(
            self.m, self.n, self.k, self.num_ranks, tile,
            group_m=self.shards.group_m, head=self.shards.head, early_parts=self.early_parts,
        )  # fmt: skip
        return products.gathered_us(
            product, H200X4, ENGINES[self.transport], chunks=self.shards.chunks, staged=False,
            num_programs=self.num_programs,
            feeders=self.shards.pieces * self.shards.chunks * max(1, self.num_ranks - 1),
        )  # fmt: skip
