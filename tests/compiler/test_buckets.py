"""Buckets of m: what is chosen for one fits each m in it."""

from __future__ import annotations

import pytest

from weft.compiler.buckets import TILE_ROWS, bucket_of, buckets_of


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_an_m_is_done_as_the_largest_of_its_bucket(num_ranks):
    for m in range(5000):
        largest = bucket_of(m, num_ranks)
        assert m <= largest <= m + max(16, m // 8)
        assert bucket_of(largest, num_ranks) == largest
        # What a configuration may depend on beside the number itself.
        assert (m % num_ranks == 0) == (largest % num_ranks == 0)
        tiles = TILE_ROWS * num_ranks
        assert (m % tiles == 0) == (largest % tiles == 0)


def test_small_m_and_whole_tiles_are_told_apart_and_others_are_few():
    assert [bucket_of(m, 4) for m in range(65)] == list(range(65))
    assert bucket_of(2048, 4) == 2048
    assert [bucket_of(m, 4) for m in (961, 964, 1000, 1020)] == [991, 992, 1020, 1020]
    assert len(buckets_of(range(1, 16385), 4)) < 400
