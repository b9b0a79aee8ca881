"""Tiles node by node: each once, own first or last, whole nodes one after the other."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from weft.tiles.hierarchy import Hierarchy, by_node


@given(
    st.integers(0, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4),
    st.integers(0, 1), st.data(),
)  # fmt: skip
def test_each_tile_comes_once(num_m, num_n, per_node, nodes, group_m, is_scatter, data):
    num_ranks = per_node * nodes
    rank = data.draw(st.integers(0, num_ranks - 1))
    args = Hierarchy(group_m, rank, num_ranks, per_node, is_scatter)
    order = [tuple(by_node.fn(i, num_m, num_n, args)) for i in range(num_m * num_n)]
    assert sorted(order) == [(i, j) for i in range(num_m) for j in range(num_n)]


def owners(rank: int, is_scatter: int, num_ranks: int = 6, per_node: int = 3) -> list[int]:
    args = Hierarchy(2, rank, num_ranks, per_node, is_scatter)
    rows = [by_node.fn(i, 12, 5, args).i_m for i in range(60)]
    return [owner for owner, _ in groupby(row // 2 for row in rows)]


def test_near_rows_first_to_gather_and_far_ones_first_to_scatter():
    assert owners(1, 0) == [1, 2, 0, 4, 5, 3]
    assert owners(1, 1) == [3, 5, 4, 0, 2, 1]
    # One after the other: of several ranks no two are at the same one.
    for is_scatter in (0, 1):
        for at in zip(*(owners(rank, is_scatter) for rank in range(6))):
            assert len(set(at)) == 6


@triton.jit
def _ask(out, num_m, num_n, rank, num_ranks, per_node):
    i = tl.program_id(0)
    at = by_node(i, num_m, num_n, Hierarchy(2, rank, num_ranks, per_node, 0))
    tl.store(out + 2 * i, at.i_m)
    tl.store(out + 2 * i + 1, at.i_n)


@pytest.mark.parametrize("rank", [0, 3])
def test_kernels_see_the_same_order(ranks, rank: int):
    def main():
        out = torch.zeros((21, 2), dtype=torch.int32)
        _ask[(21,)](out, 7, 3, rank, 4, 2)
        args = Hierarchy(2, rank, 4, 2, 0)
        assert out.tolist() == [list(by_node.fn(i, 7, 3, args)) for i in range(21)]

    ranks(main, 1)
