"""Tiles node by node: each once, own first or last, whole nodes one after the other."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.base.topology import Topology
from weft.language.mapping import as_python
from weft.tiles import hierarchy
from weft.tiles.hierarchy import Hierarchy, Nodes

by_node, receiver = map(as_python, (hierarchy.by_node, hierarchy.receiver))


def nodes_of(num_ranks: int, number: int) -> Nodes:
    return Nodes(num_ranks, num_ranks // number, num_ranks % number)


@given(
    st.integers(1, 90), st.integers(1, 4), st.sampled_from((1, 4, 16)), st.integers(1, 7),
    st.integers(1, 4), st.integers(0, 1), st.data(),
)  # fmt: skip
def test_each_tile_comes_once(m, num_n, tile_rows, num_ranks, group_m, is_scatter, data):
    number = data.draw(st.integers(1, num_ranks))
    rank = data.draw(st.integers(0, num_ranks - 1))
    rank_rows, num_m = -(-m // num_ranks), -(-m // tile_rows)
    nodes = nodes_of(num_ranks, number)
    args = Hierarchy(group_m, rank, rank_rows, tile_rows, is_scatter, nodes)
    order = [tuple(by_node(i, num_m, num_n, args)) for i in range(num_m * num_n)]
    assert sorted(order) == [(i, j) for i in range(num_m) for j in range(num_n)]
    assert sorted(receiver(hop, rank, nodes) for hop in range(num_ranks)) == [*range(num_ranks)]


def owners(rank: int, is_scatter: int, num_ranks: int = 6, number: int = 2) -> list[int]:
    """Whose rows come, each with two rows of tiles of five."""
    args = Hierarchy(2, rank, 2, 1, is_scatter, nodes_of(num_ranks, number))
    rows = [by_node(i, 2 * num_ranks, 5, args).i_m for i in range(10 * num_ranks)]
    return [owner for owner, _ in groupby(row // 2 for row in rows)]


def test_near_rows_first_to_gather_and_far_ones_first_to_scatter():
    assert owners(1, 0) == [1, 2, 0, 4, 5, 3]
    assert owners(1, 1) == [5, 3, 4, 2, 0, 1]
    # One after the other: of several ranks no two are at the same one.
    for is_scatter in (0, 1):
        for at in zip(*(owners(rank, is_scatter) for rank in range(6))):
            assert len(set(at)) == 6


@pytest.mark.parametrize(("num_ranks", "number"), [(3, 2), (5, 2), (5, 3), (7, 3)])
@pytest.mark.parametrize("is_scatter", [0, 1])
def test_nodes_that_are_not_alike(num_ranks: int, number: int, is_scatter: int):
    topology = Topology.of(num_ranks, number)
    for rank in range(num_ranks):
        order = owners(rank, is_scatter, num_ranks, number)
        own = topology.seat(rank).node
        visited = [node for node, _ in groupby(topology.seat(one).node for one in order)]
        first = own + is_scatter
        assert visited == [(first + hop) % number for hop in range(number)]
        assert order[-is_scatter] == rank
        to = [receiver(hop, rank, nodes_of(num_ranks, number)) for hop in range(num_ranks)]
        assert to[0] == rank
        assert [node for node, _ in groupby(topology.seat(one).node for one in to)] == [
            (own - hop) % number for hop in range(number)
        ]


@pytest.mark.parametrize(("num_ranks", "number"), [(4, 1), (4, 2), (6, 3), (4, 4)])
def test_rows_are_sent_in_the_order_in_which_they_are_asked_for(num_ranks: int, number: int):
    for rank in range(num_ranks):
        for hop in range(num_ranks):
            to = receiver(hop, rank, nodes_of(num_ranks, number))
            assert owners(to, 0, num_ranks, number)[hop] == rank


@triton.jit
def _ask(out, num_m, num_n, rank_rows, tile_rows: tl.constexpr, world):
    i = tl.program_id(0)
    args = hierarchy.to_gather(
        world, weft.language.rank(world).to(tl.int32), rank_rows, tile_rows, 2
    )
    at = hierarchy.by_node(i, num_m, num_n, args)
    tl.store(out + 2 * i, at.i_m)
    tl.store(out + 2 * i + 1, at.i_n)


def test_kernels_see_the_same_order_by_the_worlds_table(ranks):
    def main():
        world = weft.init()
        out = torch.zeros((21, 2), dtype=torch.int32)
        _ask[(21,)](out, 7, 3, 9, 4, world.arg)
        args = Hierarchy(2, world.rank, 9, 4, 0, nodes_of(3, 2))
        assert out.tolist() == [list(by_node(i, 7, 3, args)) for i in range(21)]
        world.close()

    ranks(main, 3, nodes=2)
