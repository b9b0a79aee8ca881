"""Sums whose chunks are launches of their own: closed form and timeline say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.base.hardware import H200X4
from weft.base.target import TARGETS
from weft.compiler import schedules
from weft.compiler.cost import plans, products
from weft.compiler.cost.products import Product
from weft.ops.gemm_rs import Config, Problem

HOPPER = TARGETS["cuda:90"]


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("tile_n", [128, 256])
def test_what_is_queued_is_played(num_ranks: int, chunks: int, tile_n: int):
    problem = Problem(8192, 8192, num_ranks, "bfloat16", (num_ranks,), 8192 // num_ranks, True)
    config = Config("ce_parts", "sm90", tile_n=tile_n, num_warps=4, chunks=chunks)
    plan = schedules.planned(problem.traced(), config, problem, HOPPER).plan
    played = plans.predict(plan, {"m": problem.m}, num_ranks, H200X4).end_us
    one = Product(8192, 8192, problem.k, num_ranks, config.tile)
    # Closed forms let own tiles wait for a chunk where they are; a timeline has it behind all own
    # ones of the chunk.
    wanted = products.in_parts_us(one, H200X4, chunks)
    assert played == pytest.approx(wanted, 0.05)


def test_chunks_pay_where_copies_take_as_long_as_products():
    """More launches cost 6 us each; one alone leaves nothing to hide its copies beneath but own
    rows."""
    few = Product(8192, 8192, 2048, 4, (128, 256, 64))
    times = {chunks: products.in_parts_us(few, H200X4, chunks) for chunks in (1, 2, 4)}
    assert times[4] < times[2] < times[1]
    long = replace(few, k=16384)
    times = {chunks: products.in_parts_us(long, H200X4, chunks) for chunks in (1, 2, 4)}
    assert times[2] < times[1] and times[2] < times[4]
