"""The order of tiles where ranks lie on several nodes: node by node, rank by rank within each.

`by_node` is a bijection of 0 .. num_m * num_n - 1 onto At(i_m, i_n), like those of swizzle.py, and
`receiver` the order in which a rank sends its rows, so that they arrive in that order; as
weft.language.mapping.as_python(function) both are the same on Python integers. Nodes lie one behind
the other, and are alike but for the first ones, which may have one rank more: so
weft.base.topology cuts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles.hooks.partition import Owned
from weft.tiles.nodes import num_nodes
from weft.tiles.swizzle import At, grouped


class Nodes(NamedTuple):
    """`per_node` ranks to a node, and one more to each of the first `wider`."""

    num_ranks: Any
    per_node: Any
    wider: Any


class Hierarchy(NamedTuple):
    """Arguments of `by_node`: rows of tiles that share columns; who asks; the height of a rank's
    rows, and of a tile; 1 to scatter, 0 to gather. Tuples come last, and no field is a constant."""

    group_m: Any
    rank: Any
    rank_rows: Any
    tile_rows: Any
    is_scatter: Any
    nodes: Any


class Scatter(NamedTuple):
    """Arguments of `scattered`."""

    parts: Any
    hierarchy: Any


@triton.jit
def node_around(rank, nodes):
    """(first rank, number of ranks) of a rank's node."""
    # Arithmetic, not branches: the same text serves integers and traced scalars.
    upto = nodes.wider * (nodes.per_node + 1)
    is_wider = min(max(upto - rank, 0), 1)
    begin = upto * (1 - is_wider)
    size = nodes.per_node + is_wider
    return begin + (rank - begin) // size * size, size


@triton.jit
def rows_before(rank, num_m, args):
    """How many rows of tiles begin among those of ranks before `rank`. args: Hierarchy"""
    return min((rank * args.rank_rows + args.tile_rows - 1) // args.tile_rows, num_m)


@triton.jit
def by_node(i, num_m, num_n, args):
    """Own node's tiles, then the next node's, and so on; or those of own ones last. args: Hierarchy

    Gather: own tiles, the others of this node, then the next node's: near rows arrive first.
    Scatter: the next node's tiles first, since they have the longest way; own ones come last, the
    others of this node before. In each node from the own seat on, so that not all ranks reach for
    the same one. A tile is whose its first row is, where it straddles two ranks' rows.
    """
    row = i // num_n  # so many rows of tiles come before, of nodes and ranks that are done
    own_first, own_size = node_around(args.rank, args.nodes)
    begin = rows_before(own_first + own_size * args.is_scatter, num_m, args)
    at = (begin + row) % num_m
    first, size = node_around(at * args.tile_rows // args.rank_rows, args.nodes)
    low = rows_before(first, num_m, args)
    rows = rows_before(first + size, num_m, args) - low
    before = (low - begin + num_m) % num_m
    # Within the node the same again, by ranks.
    seat = (args.rank - own_first + args.is_scatter) % size
    start = rows_before(first + seat, num_m, args) - low
    at = low + (start + row - before) % rows
    owner = at * args.tile_rows // args.rank_rows
    low_of_owner = rows_before(owner, num_m, args)
    before += (low_of_owner - low - start + rows) % rows
    height = rows_before(owner + 1, num_m, args) - low_of_owner
    tile = grouped(i - before * num_n, height, num_n, (args.group_m,))
    return At(low_of_owner + tile.i_m, tile.i_n)


@triton.jit
def receiver(hop, rank, nodes):
    """To whom own rows go `hop`-th, 0 .. num_ranks - 1; hop 0 is this rank itself.

    Where nodes are alike it asks for them hop-th, by `by_node`: near ones first, then those of the
    node before, which has come round to this one when its own rows are done.
    """
    own_first, own_size = node_around(rank, nodes)
    at = (own_first + own_size - 1 - hop + nodes.num_ranks) % nodes.num_ranks
    first, size = node_around(at, nodes)
    from_end = first + size - 1 - at
    return first + (rank - own_first - from_end + size) % size


@triton.jit
def nodes_of(world):
    """The world's Nodes. Where ranks do not lie so, some, by which each tile comes once too."""
    number = num_nodes(world)
    num_ranks = tl.cast(world.num_ranks, tl.int32)
    return Nodes(num_ranks, num_ranks // number, num_ranks % number)


@triton.jit
def to_gather(world, rank, rank_rows, tile_rows, group_m):
    """Arguments of `by_node` for tiles that are cut from all rows."""
    return Hierarchy(
        tl.cast(group_m, tl.int32), rank, rank_rows, tl.cast(tile_rows, tl.int32),
        tl.cast(0, tl.int32), nodes_of(world),
    )  # fmt: skip


@triton.jit
def to_scatter(world, rank, parts):
    """Arguments of `scattered`. parts: partition.Parts"""
    # One part is multiplied at a time, not all of them.
    group_m = min(parts.group_m * world.num_ranks, parts.tiles_m)
    one = tl.cast(1, tl.int32)
    return Scatter(parts, Hierarchy(group_m, rank, parts.tiles_m, one, one, nodes_of(world)))


@triton.jit
def scattered(i, num_m, num_n, args):
    """As order.scattered, by nodes: own tiles come behind all others, so no program waits for one
    that is later in its own rank's order. args: Scatter"""
    at = by_node(i, num_m, num_n, args.hierarchy)
    parts = args.parts
    owner = at.i_m // parts.tiles_m
    row = at.i_m - owner * parts.tiles_m
    end = min(max(parts.m - owner * parts.rows, 0), parts.rows)
    return Owned(at.i_m, at.i_n, owner, row * parts.tile_m, end)
