"""The closed form of rounds against a walk over all tiles, which is what it stands for."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest

from weft.base.hardware import H200X4
from weft.compiler.cost import products
from weft.compiler.cost.products import Product
from weft.compiler.cost.rounds import Arrival, Rounds
from weft.tiles import gemm_sm90, tile_scheduler
from weft.tiles.blocking import Blocking


def rows_in_order(product: Product) -> list[int]:
    """Of each tile of the order its row of tiles, own rows' first."""
    found, (num_m, num_n) = [], product.tiles
    for begin, end in ((0, product.own_rows), (product.own_rows, num_m)):
        for first in range(begin, end, product.group_m):
            found += [*range(first, min(first + product.group_m, end))] * num_n
    return found


def walked_us(product, waves, programs, each_us, share_us, ready, late=0, late_us=0.0) -> float:
    """Program by program, unit by unit, as the template takes them."""
    rows, ends = rows_in_order(product), []
    for program in range(programs):
        now = late_us if program >= programs - late else 0.0
        for unit in tile_scheduler.units(program, waves, programs):
            begin = max(now, ready[rows[unit.tile]])
            now = begin + each_us / unit.parts + (share_us if unit.parts > 1 else 0.0)
        ends.append(now)
    return max(ends)


def drawn(draw: random.Random) -> tuple[Product, int]:
    """Any product that is not too large to be walked over, and its programs."""
    num_ranks, programs = draw.choice((1, 2, 3, 4, 8)), draw.choice((7, 24, 131, 132))
    m, n = draw.randint(1, 6000), draw.choice((100, 512, 2560, 3584, 7168))
    k, columns = draw.choice((256, 2048, 8192)), draw.choice((64, 128, 160, 256))
    product = Product(m, n, k, num_ranks, (128, columns, 64), group_m=draw.choice((1, 3, 8, 16)))
    own = product.rows // 128
    if num_ranks > 1 and own and m == product.rows * num_ranks and product.rows % 128 == 0:
        most = tile_scheduler.first_wave_of(own * product.tiles[1], ceil(k / 64), programs)
        return replace(product, head=own, first_wave=draw.randint(1, most)), programs
    return product, programs


@pytest.mark.parametrize("seed", range(150))
def test_rounds_end_when_the_last_of_all_tiles_does(seed):
    draw = random.Random(seed)
    product, programs = drawn(draw)
    if seed % 2:  # shards of whole tiles, whose own rows may be early
        rows = 128 * draw.randint(1, 12)
        product, programs = replace(product, m=rows * product.num_ranks, head=0), programs
        most = tile_scheduler.first_wave_of(rows // 128 * product.tiles[1], 32, programs)
        if product.num_ranks > 1:
            product = replace(product, head=rows // 128, first_wave=draw.randint(1, most))
    num_m, num_n = product.tiles
    blocking = Blocking(*product.tile, gemm_sm90.NUM_WARPS, 1)
    early = product.head * num_n
    waves = tile_scheduler.waves_of(num_m * 128, product.n, product.k, blocking, programs, early,
                         product.first_wave)  # fmt: skip
    each_us, share_us = draw.choice((0.5, 5.0, 40.0)), draw.choice((0.0, 5.0, 30.0))
    steps = sorted(draw.sample(range(num_m), min(num_m, draw.randint(0, 9))))
    times = sorted(draw.uniform(0, 300) for _ in steps)
    late = draw.choice((0, programs, draw.randint(1, programs)))
    late_us = draw.uniform(0, 200) if late else 0.0
    ready, at = [0.0] * num_m, 0.0
    for row in range(num_m):
        at = max([us for us, step in zip(times, steps) if step == row], default=at)
        ready[row] = at
    arrivals = [Arrival(us, product.first_tile(row)) for us, row in zip(times, steps)]
    found = Rounds(waves, programs, each_us, share_us, late, late_us).end_us(arrivals)
    walked = walked_us(product, waves, programs, each_us, share_us, ready, late, late_us)
    assert found == pytest.approx(walked)


@pytest.mark.parametrize("engine", ["ce_push", "sm_push", "sm_put"])
@pytest.mark.parametrize("seed", range(12))
def test_tiles_wait_for_the_chunk_that_has_their_last_row(engine, seed):
    draw = random.Random(100 * seed + len(engine))
    product, _ = drawn(draw)
    chunks = draw.randint(1, min(4, product.rows))
    steps = products._arrivals(product, H200X4, engine, chunks, 20)
    assert [us for us, _ in steps] == sorted(us for us, _ in steps)
    chunk_rows = ceil(product.rows / chunks)
    found: dict[int, int] = {}
    for tile in range(product.tiles[0]):
        hop, row = divmod(min((tile + 1) * 128, product.m) - 1, product.rows)
        is_one = engine != "ce_push"
        part = min(hop, 1) if is_one else hop * chunks + row // chunk_rows if hop else 0
        found.setdefault(part, tile)
    begins = dict(reversed(steps))
    assert set(found.values()) <= set(begins.values()) | {0}
    for us, row in steps:
        there = [tile for tile in found.values() if tile <= row]
        assert there, (us, row)
