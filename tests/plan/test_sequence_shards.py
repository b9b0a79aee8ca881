"""Tokens over the ranks: every one on one rank, in order there, with equal work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weft.plan.sequence_shards import COUNT, ROW, most_rows, one_sequence, rows_of, shards_of

CPU = torch.device("cpu")


@st.composite
def packed(draw):
    """(m, where sequences begin and the last one ends)"""
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=5))
    before, after = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    starts = torch.tensor([before, *lengths]).cumsum(0).int()
    return int(starts[-1]) + after, starts


@given(packed(), st.integers(1, 6), st.booleans())
def test_every_token_is_on_one_rank_in_the_order_of_its_sequence(given, num_ranks, zigzag):
    m, starts = given
    shards = shards_of(m, num_ranks, zigzag, starts, CPU)
    found = []
    for rank in range(num_ranks):
        place, within = shards.positions(rank)
        assert len(place) == rows_of(m, rank, num_ranks, zigzag) <= most_rows(m, num_ranks)
        assert torch.equal(place, place.sort().values), "queries see ranges that never fall"
        of = torch.searchsorted(shards.ends, place.int(), right=True) - 1
        assert torch.equal(within, place - shards.ends[of])
        found += place.tolist()
    assert sorted(found) == list(range(m))
    if not zigzag:
        assert found == list(range(m)), "as torch.chunk splits them"
    padded = torch.full((num_ranks * most_rows(m, num_ranks),), -1)
    for rank in range(num_ranks):
        place, _ = shards.positions(rank)
        padded[rank * most_rows(m, num_ranks) :][: len(place)] = place
    assert torch.equal(padded[shards.places()], torch.arange(m))


@given(st.integers(0, 400), st.integers(0, 9), st.integers(1, 8))
@example(4096, 0, 8)
@example(17, 3, 4)
def test_causal_work_is_the_same_on_all_ranks(length, first, num_ranks):
    """Of each sequence within two queries' work, wherever it begins; in order it is not."""
    starts = torch.tensor([first, first + length], dtype=torch.int32)
    works = {}
    for zigzag in (True, False):
        shards = shards_of(first + length, num_ranks, zigzag, starts, CPU)
        each = []
        for rank in range(num_ranks):
            place, within = shards.positions(rank)
            each.append(int((within + 1)[place >= first].sum()))
        works[zigzag] = each
    assert sum(works[True]) == length * (length + 1) // 2
    assert max(works[True]) - min(works[True]) <= 2 * length
    if length >= 20 * num_ranks > 20:
        assert max(works[False]) - min(works[False]) > 2 * length


@given(st.integers(0, 60), st.integers(1, 7), st.booleans())
def test_one_sequence_by_the_host_is_the_same(m, num_ranks, zigzag):
    found = one_sequence(m, num_ranks, zigzag, CPU)
    wanted = shards_of(m, num_ranks, zigzag, None, CPU)
    assert torch.equal(found.ends, wanted.ends) and found.table.shape == wanted.table.shape
    # Where parts of no tokens begin says nothing.
    for rank in range(num_ranks):
        for row in (ROW, COUNT):
            assert torch.equal(found.table[rank, row], wanted.table[rank, row])
        for got, place in zip(found.positions(rank), wanted.positions(rank), strict=True):
            assert torch.equal(got, place)


def test_whole_parts_are_the_fields():
    """Lengths that 2n divides: part r, and 2n - 1 - r, of each sequence."""
    shards = shards_of(24, 3, True, torch.tensor([0, 12, 24], dtype=torch.int32), CPU)
    wanted = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for rank, one in enumerate(wanted):
        place, within = shards.positions(rank)
        assert place.tolist() == [*one, *(12 + x for x in one)]
        assert within.tolist() == one * 2


@pytest.mark.parametrize("starts", [[5, 2, 90], [-4, 3, 9], [9, 9, 2]])
def test_lengths_that_are_wrong_reach_nothing_outside(starts):
    for zigzag in (True, False):
        shards = shards_of(10, 3, zigzag, torch.tensor(starts, dtype=torch.int32), CPU)
        for rank in range(3):
            place, _ = shards.positions(rank)
            assert len(place) == shards.rows(rank) and place.min() >= 0 and place.max() < 10
