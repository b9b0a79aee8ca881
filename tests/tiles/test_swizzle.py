"""Orders of tiles are bijections; own tiles come first to gather."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.tiles import swizzle

GROUPED, ROTATED = swizzle.grouped.fn, swizzle.rotated.fn
FIRST_TO_GATHER = swizzle.first_to_gather.fn

extent = st.integers(1, 17)


def every_tile(num_m: int, num_n: int) -> set[tuple[int, int]]:
    return {(i_m, i_n) for i_m in range(num_m) for i_n in range(num_n)}


@given(num_m=extent, num_n=extent, group_m=extent)
def test_grouped_is_a_bijection(num_m, num_n, group_m):
    tiles = [GROUPED(i, num_m, num_n, (group_m,)) for i in range(num_m * num_n)]
    assert set(tiles) == every_tile(num_m, num_n)


@given(num_m=extent, num_n=extent, group_m=extent, first=st.integers(0, 16), data=st.data())
def test_rotated_is_a_bijection(num_m, num_n, group_m, first, data):
    first %= num_m
    head = data.draw(st.integers(1, num_m))
    tiles = [ROTATED(i, num_m, num_n, (group_m, first, head)) for i in range(num_m * num_n)]
    assert set(tiles) == every_tile(num_m, num_n)
    assert tiles[0] == (first, 0)
    behind = [(i_m - first) % num_m >= head for i_m, _ in tiles]
    assert behind == sorted(behind)


@given(num_m=extent, num_n=extent, group_m=extent)
def test_a_group_of_rows_is_finished_before_the_next_begins(num_m, num_n, group_m):
    groups = [GROUPED(i, num_m, num_n, (group_m,))[0] // group_m for i in range(num_m * num_n)]
    assert groups == sorted(groups)


def split(m: int, num_ranks: int, rank: int) -> tuple[int, int]:
    rows = -(-m // num_ranks)
    return min(rank * rows, m), min((rank + 1) * rows, m)


@given(
    m=st.integers(1, 300), num_n=extent, tile_m=st.integers(1, 64),
    num_ranks=st.integers(1, 6), data=st.data(),
)  # fmt: skip
def test_gather_takes_own_tiles_first_and_then_the_next_ranks(m, num_n, tile_m, num_ranks, data):
    rank = data.draw(st.integers(0, num_ranks - 1))
    own_first, own_end = split(m, num_ranks, rank)
    num_m = -(-m // tile_m)
    first = FIRST_TO_GATHER(own_first, own_end, tile_m, num_m)
    assert 0 <= first < num_m
    if own_first == own_end:
        return

    def is_own(i_m: int) -> bool:
        return own_first <= i_m * tile_m and min((i_m + 1) * tile_m, m) <= own_end

    rows = [ROTATED(i, num_m, num_n, (1, first, 1))[0] for i in range(num_m * num_n)][::num_n]
    own = [is_own(i_m) for i_m in rows]
    assert own == sorted(own, reverse=True), "an own tile comes after another rank's"
    if not any(own):
        # Own rows lie within one tile of others': begin with that one.
        assert rows[0] * tile_m < own_end and own_first < (rows[0] + 1) * tile_m
    # After that by the rank whose rows a tile needs last: this one + 1, + 2, ...
    owners = [min((i_m + 1) * tile_m, m) - 1 for i_m in rows]
    hops = [(row // -(-m // num_ranks) - rank) % num_ranks for row in owners]
    assert hops[1:] == sorted(hops[1:]) or hops[-1] == 0
