"""How far ranks' clocks are apart."""

from __future__ import annotations

import weft
from weft.tune.clocks import ROUNDS, Offset, estimate, offsets


def test_the_question_that_was_answered_first_counts():
    own = [(100, 900), (1000, 1200), (2000, 2900)]
    there = [(5000, 0), (6103, 0), (7000, 0)]
    assert estimate(own, there) == Offset(6103 - 1100, 100)


def test_emulated_ranks_have_one_clock(ranks):
    """The way to rank 0 takes as long as that back: the estimate is exact."""

    def main():
        found = offsets(weft.init())
        assert ROUNDS > 1
        return found

    for found in ranks(main, 3, hardware="h200x4"):
        assert [one.ns for one in found] == [0, 0, 0]
        assert found[1].error_ns == found[2].error_ns > 0


def test_one_rank_asks_nobody(ranks):
    assert ranks(lambda: offsets(weft.init()), 1) == [[Offset(0, 0)]]
