"""Records of tiles as times and waits, from records written by hand."""

from __future__ import annotations

from weft.language import world_layout as layout
from weft.tune.tile_times import Part, read, waits_of


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


def test_a_wait_behind_which_another_tile_is_multiplied_costs_nothing():
    """On Hopper one warp waits while others multiply."""
    tiles = read([
        record((0, 0), 0, 1000, 0, [(1000, 3000, 0, 3500)]),
        record((0, 1), 0, 1200, 2500, [(3000, 4000, 0, 4500)]),
        record((1, 0), 1, 1200, 300, [(0, 2000, 0, 2100)]),
    ], rank=0)  # fmt: skip
    found = {(tile.i_m, tile.i_n): spans for tile, spans in waits_of(tiles)}
    assert found == {(0, 0): [], (0, 1): [(3500, 3700)], (1, 0): [(1200, 1500)]}
