"""Orders: every tile once, foreign ones first, and a signal of its own for each."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.language import mapping
from weft.tiles.hooks import order as orders
from weft.tiles.hooks import partition


def parts_of(m: int, n: int, num_ranks: int, programs: int, group_m: int, last: int, words=1):
    """Tiles of 4 x 4."""
    rows = ceil(m / num_ranks)
    tiles_m, num_n = ceil(rows / 4), ceil(n / 4)
    lead, tail = orders.order_of(num_ranks, tiles_m * num_n, programs, last, group_m * num_n)
    return partition.Parts(m, n, rows, 4, 4, tiles_m, num_n, words, lead, tail, group_m, 1, num_n)


worlds = st.tuples(
    st.integers(1, 90), st.integers(1, 30), st.integers(1, 5), st.integers(1, 9),
    st.integers(1, 5), st.integers(1, 3),
)  # fmt: skip


scattered = mapping.as_python(orders.scattered)


def order_of(parts, rank, num_ranks):
    num_m = parts.tiles_m * num_ranks
    args = orders.Scatter(rank, parts)
    total = num_m * parts.num_n
    return [scattered(i, num_m, parts.num_n, args) for i in range(total)]


@given(worlds, st.data())
def test_every_row_of_every_part_is_in_one_tile_of_its_owner(world, data):
    m, n, num_ranks, *_ = world
    parts = parts_of(*world)
    rank = data.draw(st.integers(0, num_ranks - 1))
    order = order_of(parts, rank, num_ranks)
    assert len({(at.i_m, at.i_n) for at in order}) == len(order)
    seen = set()
    for at in order:
        assert at.owner == at.i_m // parts.tiles_m and at.i_n < parts.num_n
        first = at.owner * parts.rows
        rows = range(first + at.row, first + min(at.row + 4, at.end))
        columns = range(at.i_n * 4, min(at.i_n * 4 + 4, n))
        cells = {(row, column) for row in rows for column in columns}
        assert not seen & cells
        seen |= cells
    assert seen == {(row, column) for row in range(m) for column in range(n)}


@given(worlds, st.data())
def test_own_tiles_begin_late_and_are_the_last(world, data):
    num_ranks = world[2]
    parts = parts_of(*world)
    rank = data.draw(st.integers(0, num_ranks - 1))
    owners = [at.owner for at in order_of(parts, rank, num_ranks)]
    assert rank not in owners[: parts.lead]
    assert set(owners[len(owners) - parts.tail :]) == {rank}
    # Between them they come evenly, so that links are used alike.
    middle = [owner == rank for owner in owners[parts.lead : len(owners) - parts.tail]]
    places = [i for i, is_own in enumerate(middle) if is_own]
    gaps = [after - before for before, after in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(worlds, st.data())
def test_what_an_own_tile_waits_for_is_earlier_in_the_order_of_whoever_gives_it(world, data):
    """So programs that take tiles in this order never wait for each other in a ring."""
    num_ranks = world[2]
    parts = parts_of(*world)
    places = [
        {(at.i_m, at.i_n): i for i, at in enumerate(order_of(parts, rank, num_ranks))}
        for rank in range(num_ranks)
    ]
    rank = data.draw(st.integers(0, num_ranks - 1))
    for at in order_of(parts, rank, num_ranks):
        if at.owner == rank:
            mine = places[rank][at.i_m, at.i_n]
            others = [places[other][at.i_m, at.i_n] for other in range(num_ranks) if other != rank]
            assert all(theirs < mine for theirs in others)


@given(worlds, st.integers(1, 2))
def test_each_source_has_a_word_for_each_part_of_each_tile(world, words):
    num_ranks = world[2]
    parts = parts_of(*world, words)
    own = [at for at in order_of(parts, 0, num_ranks) if at.owner == 0]
    found = [
        partition.signal_of.fn(0, at, part, source, num_ranks, parts)
        for at in own
        for part in range(words)
        for source in range(num_ranks)
    ]
    assert sorted(found) == list(range(parts.tiles_m * parts.num_n * words * num_ranks))


@pytest.mark.parametrize("num_ranks", (2, 3, 4))
def test_own_tiles_between_the_others_are_in_their_columns(num_ranks):
    """Whole groups of rows behind them: what programs multiply at a time shares columns of B."""
    num_n, group_m = 32, 4
    parts = parts_of(num_ranks * 64, num_n * 4, num_ranks, 48, group_m, 3)
    order = order_of(parts, 0, num_ranks)
    assert 0 < parts.lead == (num_ranks - 1) * parts.tail and parts.tail % (group_m * num_n) == 0
    middle = order[parts.lead : len(order) - parts.tail]
    assert {at.owner for at in middle} == set(range(num_ranks))
    pairs = [(own, other) for other, own in pairwise(middle) if own.owner == 0 != other.owner]
    assert pairs
    for own, other in pairs:
        assert own.i_n == other.i_n, "the same columns"
        assert own.row < other.row, "of an earlier group"


def test_where_few_own_tiles_are_asked_for_at_the_end_there_are_few():
    # A group of 8 rows has 512 tiles: of four turns, where one is asked for.
    assert orders.order_of(2, 1024, 132, 1, 512) == (264, 132)
    assert orders.order_of(2, 1024, 132, 3, 512) == (512, 512)
    # One group is all: then they come without sharing columns, not all at the end.
    assert orders.order_of(2, 512, 132, 3, 512) == (264, 396)
