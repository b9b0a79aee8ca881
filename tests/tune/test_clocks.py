"""How far ranks' clocks are apart."""

from __future__ import annotations

import weft
from weft.tune.clocks import ROUNDS, Offset, estimate, offsets


def test_the_question_that_was_answered_first_counts():
    own = [(100, 900), (1000, 1200), (2000, 2900)]
    there = [(5000, 0), (6103, 0), (7000, 0)]
    assert estimate(own, there) == Offset(6103 - 1100, 100)


def test_every_rank_knows_how_far_all_are_apart(ranks):
    """Emulated clocks count looks: rank 0 looks once for each question, others twice."""

    def main():
        found = offsets(weft.init())
        assert ROUNDS > 1
        return found

    first, *others = ranks(main, 3)
    assert all(found == first for found in others) and first[0] == Offset(0, 0)
    assert all(one.error_ns > 0 for one in first[1:])


def test_one_rank_asks_nobody(ranks):
    assert ranks(lambda: offsets(weft.init()), 1) == [[Offset(0, 0)]]
