"""Records of tiles as times and figures, from records written by hand."""

from __future__ import annotations

import pytest

from weft.language import world_layout as layout
from weft.tune.tile_times import Part, figures, read


def record(tile=(0, 0), program=0, start=0, waited=0, parts=()):
    words = [0] * layout.TRACE_WORDS
    words[layout.TRACE_TILE] = tile[0] << 32 | tile[1]
    words[layout.TRACE_PROGRAM], words[layout.TRACE_START] = program, start
    words[layout.TRACE_WAITED] = waited
    for number, part in enumerate(parts):
        first = layout.TRACE_BEGUN + number * layout.TRACE_EACH
        words[first : first + layout.TRACE_EACH] = part
    return words


NOTHING = record()


def test_records_are_read_on_rank_0s_clock_and_empty_ones_are_none():
    whole = record((3, 5), 2, 1000, 200, [(0, 1700, 0, 1900)])
    (tile,) = read([NOTHING, whole, NOTHING], rank=1, offset=-100)
    assert (tile.rank, tile.program, tile.i_m, tile.i_n) == (1, 2, 3, 5)
    assert (tile.start, tile.waited, tile.end) == (900, 200, 1800)
    # Nobody else multiplies, and nothing is combined: it begins where the wait ends.
    assert tile.parts == (Part(begun=1100, summed=1600, combined=1600, end=1800),)


def test_a_consumer_that_stands_ready_early_has_not_begun():
    early = record((0, 0), 0, 1000, 500, [(1100, 1800, 0, 1900), (1600, 2000, 0, 2100)])
    (tile,) = read([early], rank=0)
    assert [part.begun for part in tile.parts] == [1500, 1600] and tile.end == 2100


def test_figures_add_up_what_programs_did():
    tiles = read([
        record((0, 0), 0, 1000, 100, [(0, 1500, 1900, 2000)]),
        record((0, 1), 0, 2000, 300, [(0, 2600, 0, 3000)]),
        record((1, 0), 1, 1000, 2000, [(0, 3000, 0, 3000)]),
    ], rank=0)  # fmt: skip
    found = figures(tiles, 0, begin=500)
    assert (found.programs, found.tiles, found.first_us, found.end_us) == (2, 3, 0.5, 2.5)
    assert found.waiting_us == 0.1 + 0.3 + 2.0
    assert found.combining_us == 0.4 and found.computing_us == pytest.approx(0.5 + 0.7)
    assert found.busy == pytest.approx(1.2 / 4.0)
    assert [one["tile"] for one in found.longest_waits] == [[1, 0], [0, 1], [0, 0]]
    assert found.longest_waits[1] == {
        "tile": [0, 1], "program": 0, "at_us": 1.5, "waited_us": 0.3,
    }  # fmt: skip


def test_a_wait_behind_which_another_tile_is_multiplied_costs_nothing():
    """On Hopper one warp waits while others multiply."""
    tiles = read([
        record((0, 0), 0, 1000, 0, [(1000, 3000, 0, 3500)]),
        record((0, 1), 0, 1200, 2500, [(3000, 4000, 0, 4500)]),
    ], rank=0)  # fmt: skip
    found = figures(tiles, 0, begin=1000)
    assert found.waiting_us == 0.2 and found.computing_us == 2.5 + 0.8
    assert found.longest_waits[0]["waited_us"] == 2.5


def test_a_rank_without_tiles():
    assert figures([], 3, begin=0).busy == 0.0
