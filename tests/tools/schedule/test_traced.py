"""A traced call: what tiles say of themselves."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.errors import UsageError
from weft.base.target import TARGETS
from weft.tools.check import Work, call_once
from weft.tools.programs import find_op
from weft.tools.schedule import traced
from weft.tools.schedule.chart import chart_of, engine_of


def work_of(op, **shape):
    return Work(find_op(op), 2, shape, "bfloat16", (2,))


def emulated(work, transport):
    """The same call on emulated ranks, whose clocks count how often a program looks."""
    with weft.emulated(2, num_sms=4) as session:
        found = session.run(lambda: traced.call_traced(work, transport, 0))
    return traced.gathered(work, *found[0])


@pytest.fixture(scope="module", autouse=True)
def few_tiles():
    """The emulator looks after each word of what is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "MOST_TILES", 64)
        yield


@pytest.fixture(scope="module")
def gathered():
    """Rows of both ranks, in tiles that none of them straddles."""
    return emulated(work_of("ag_gemm", m=64, n=96, k=32), "ce_push")


def test_every_tile_of_every_rank_is_there_once(gathered):
    for rank in range(2):
        tiles = [(tile.i_m, tile.i_n) for tile in gathered.tiles if tile.rank == rank]
        assert tiles and len(set(tiles)) == len(tiles)
        columns = 1 + max(i_n for _, i_n in tiles)
        assert sorted(tiles) == [(i_m, i_n) for i_m in range(len(tiles) // columns)
                                 for i_n in range(columns)]  # fmt: skip


def test_what_is_drawn_adds_up_to_the_totals(gathered):
    chart = chart_of(traced.spans_of(gathered.tiles))
    assert {(bar.rank, engine_of(bar.lane)) for bar in chart.spans} == {(0, "SMs"), (1, "SMs")}
    for kind in ("work", "wait"):
        drawn = sum(bar.end_us - bar.start_us for bar in chart.spans if bar.kind == kind)
        told = sum(getattr(one, f"{kind}_us") for one in chart.totals)
        assert drawn == pytest.approx(told) and drawn > 0


def test_a_traced_world_computes_the_same(ranks):
    work = work_of("gemm_ar", m=32, n=32, k=32)
    config = traced.config_for(work, "sm_push", TARGETS["emu"])
    plain = ranks(lambda: call_once(work, config)[0], 2)

    def main():
        world = weft.init(trace_tiles=1)  # too few on purpose: what is left out harms nothing
        out = work.op.run(world, work.problem(), work.inputs(world.rank, 0), config)
        world.synchronize()
        return out.clone(), world.trace.tolist()

    for (out, ((tile, _, start, *_),)), expected in zip(ranks(main, 2), plain, strict=True):
        assert torch.equal(out, expected) and tile >= 0 and start == 1


def test_a_kernel_that_leaves_nothing_is_an_error():
    with pytest.raises(UsageError, match=r"ran no kernel that leaves a trace.*--transport"):
        emulated(work_of("ag_gemm", m=2, n=32, k=32), "ll")


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("op, transport", [("ag_gemm", "ce_push"), ("gemm_rs", "sm_push")])
def test_on_gpus(op, transport):
    found = traced.traced_on_gpus(work_of(op, m=4096, n=2048, k=2048), transport, seed=0)
    assert len(found.clocks) == 2 and found.clocks[1].error_ns > 0
    tiles = {rank: [tile for tile in found.tiles if tile.rank == rank] for rank in range(2)}
    for own in tiles.values():
        # Of 128 x 256 at most.
        assert len({(tile.i_m, tile.i_n) for tile in own}) >= 32 * 8
        assert all(tile.waited >= 0 and tile.end >= tile.start for tile in own)
    if op == "gemm_rs":
        # On one clock nobody has a sum before the other rank has begun its tiles.
        for rank, own in tiles.items():
            begun = min(tile.start for tile in tiles[1 - rank])
            assert max(tile.end for tile in own) >= begun - found.clocks[1].error_ns
    chart = chart_of(traced.spans_of(found.tiles))
    assert chart.end_us > 0 and all(one.work_us > 0 for one in chart.totals)
