"""A traced call: what tiles say of themselves, on the emulator and on GPUs."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.errors import UsageError
from weft.base.target import TARGETS
from weft.tools.check import Work, call_once
from weft.tools.programs import find_op
from weft.tools.schedule import traced


def work_of(op, **shape):
    return Work(find_op(op), 2, shape, "bfloat16", (2,))


def emulated(work, transport):
    return traced.traced_emulated(work, transport, "h200x4", seed=0, num_sms=4)


@pytest.fixture(scope="module")
def gathered():
    """Rows of both ranks, in tiles that none of them straddles."""
    return emulated(work_of("ag_gemm", m=64, n=96, k=32), "ce_push")


def test_every_tile_of_every_rank_is_there_once(gathered):
    for rank, figures in enumerate(gathered.figures):
        tiles = [(tile.i_m, tile.i_n) for tile in gathered.tiles if tile.rank == rank]
        assert len(set(tiles)) == len(tiles) == figures.tiles
        columns = 1 + max(i_n for _, i_n in tiles)
        assert sorted(tiles) == [(i_m, i_n) for i_m in range(len(tiles) // columns)
                                 for i_n in range(columns)]  # fmt: skip
        assert figures.rank == rank and 0 < figures.busy < 1


def test_tiles_of_other_ranks_rows_wait_and_own_ones_do_not(gathered):
    rows = 1 + max(tile.i_m for tile in gathered.tiles)
    first = {}
    for tile in gathered.tiles:
        is_own = tile.i_m * 2 // rows == tile.rank
        if is_own:
            assert tile.waited == 0
        else:
            first.setdefault((tile.rank, tile.program), tile)
        (part,) = tile.parts
        assert tile.start + tile.waited <= part.begun < part.summed == part.combined < part.end
    # Who comes first to another rank's rows waits for the copy engine, some microseconds.
    assert first and all(tile.waited > 1000 for tile in first.values())
    for figures in gathered.figures:
        longest = figures.longest_waits[0]
        assert longest["tile"][0] * 2 // rows != figures.rank
        assert figures.waiting_us >= longest["waited_us"] > 1


def test_what_is_drawn_adds_up_to_the_figures(gathered):
    chart = traced.drawn(gathered)
    assert [row.title for row in chart.rows] == ["SMs", "SMs"] and not chart.more_arrows
    bars = [bar for row in chart.rows for lane in row.lanes for bar in lane.bars]
    for kind, total in (("work", "computing_us"), ("wait", "waiting_us")):
        drawn = sum(bar.end_us - bar.start_us for bar in bars if bar.kind == kind)
        assert drawn == pytest.approx(sum(getattr(one, total) for one in gathered.figures))
    for one, figures in zip(chart.totals, gathered.figures, strict=True):
        whole = one.sms * (figures.end_us - figures.first_us)
        assert figures.busy == pytest.approx(one.work_us / whole, rel=1e-2)
    cells = traced.as_words(gathered.figures[0])
    assert len(cells) == len(traced.HEAD) and cells[0] == "0" and "µs, tile" in cells[-1]


def test_sums_that_come_from_other_ranks_are_combining(gathered):
    found = emulated(work_of("gemm_rs", m=64, n=64, k=32), "sm_push")
    for figures in found.figures:
        # Own tiles alone wait for what others send.
        assert figures.combining_us > 1 and figures.waiting_us == 0
    assert all(one.combining_us == 0 for one in gathered.figures)


def test_waits_for_segments_are_added_up():
    """A gradient's tile sums over the rows of one rank after the other, as they come."""
    found = emulated(work_of("ag_wgrad", m=64, n=32, k=32), "ce_push")
    for figures in found.figures:
        longest = figures.longest_waits[0]["waited_us"]
        assert 1 < longest <= figures.waiting_us and figures.computing_us > 0
        assert figures.end_us - figures.first_us > longest


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
    assert found.target == "cuda" and len(found.clocks) == 2 and found.clocks[1].error_ns > 0
    tiles = {rank: [tile for tile in found.tiles if tile.rank == rank] for rank in range(2)}
    for rank, own in tiles.items():
        # Of 128 x 256 at most.
        assert len({(tile.i_m, tile.i_n) for tile in own}) >= 32 * 8
        assert all(tile.waited >= 0 and tile.end >= tile.start for tile in own)
        assert 0 < found.figures[rank].busy <= 1
    if op == "gemm_rs":
        # On one clock nobody has a sum before the other rank has begun its tiles.
        for rank, own in tiles.items():
            begun = min(tile.start for tile in tiles[1 - rank])
            assert max(tile.end for tile in own) >= begun - found.clocks[1].error_ns
    assert traced.drawn(found).end_us > 0
