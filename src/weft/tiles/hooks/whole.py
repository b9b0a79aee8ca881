"""Rows that all ranks have, cut in tiles from the first to the last: one may lie on two ranks.

`arrange_*` are made once by a program, before its tiles; `rotated` and `by_node` are the orders
that take what they give.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.language import mapping
from weft.tiles import gemm, hierarchy, swizzle


class At(NamedTuple):
    """A tile: rows first .. end - 1, which are all this rank's own or not."""

    i_m: Any
    i_n: Any
    first: Any
    end: Any
    is_own: Any


class Turns(NamedTuple):
    """What a launch of rows that all ranks have is told beside how they are cut: `group_m` rows of
    tiles share columns, the first `head` rows of tiles are a group by themselves, each of whose
    tiles has `first_wave` split-k programs; `pushers` communication CTAs store own rows to peers,
    each chunk for each rank in so many `pieces`."""

    group_m: Any
    head: Any
    first_wave: Any
    pushers: Any
    pieces: Any


class Order(NamedTuple):
    """Arguments of `rotated`; tuples last, no constant: Triton 3.6 would forget those behind it."""

    group_m: Any
    start: Any
    head: Any
    tile_m: Any
    rank: Any
    split: Any


class OrderByNode(NamedTuple):
    """Arguments of `by_node`, likewise."""

    tile_m: Any
    rank: Any
    split: Any
    nodes: Any


@triton.jit
def count(shape, tile_m):
    """How many rows of tiles there are."""
    return tl.cdiv(shape.m, tile_m)


@triton.jit
def _placed(tile, args):
    """The record of a tile, and whether its rows are own."""
    first = tile[0] * args.tile_m
    end = min(first + args.tile_m, args.split.rows)
    own_first, own_end = mapping.rows_of_rank(args.rank, args.split)
    return At(tile[0], tile[1], first, end, (first >= own_first) & (end <= own_end))


@triton.jit
def arrange(rank, split, turns, tile_m, num_m):
    """Where this rank begins, and how many rows of tiles no group may reach over."""
    own_first, own_end = mapping.rows_of_rank(rank, split)
    start = swizzle.first_to_gather(own_first, own_end, tile_m, num_m)
    return Order(
        tl.cast(turns.group_m, tl.int32), start, tl.cast(turns.head, tl.int32),
        tl.cast(tile_m, tl.int32), rank, split,
    )  # fmt: skip


@triton.jit
def rotated(i, num_m, num_n, args):
    """Own tiles first, then those of rank + 1, + 2, ..., in which order rows arrive. args: Order"""
    return _placed(swizzle.rotated(i, num_m, num_n, (args.group_m, args.start, args.head)), args)


@triton.jit
def arrange_by_node(rank, split, turns, tile_m, world):
    """Which ranks share a node."""
    nodes = hierarchy.to_gather(world, rank, split.rank_rows, tile_m, turns.group_m)
    return OrderByNode(tl.cast(tile_m, tl.int32), rank, split, nodes)


@triton.jit
def by_node(i, num_m, num_n, args):
    """Own tiles, then those of this node's other ranks, then node by node. args: OrderByNode"""
    return _placed(hierarchy.by_node(i, num_m, num_n, args.nodes), args)


@triton.jit
def arrange_grouped(turns):
    """How many rows of tiles share columns. For swizzle.grouped"""
    return (turns.group_m,)


@triton.jit
def rows_of(at, tile, a, m):
    """A is there from the start."""
    return gemm.Rows(source=a, first=at.i_m * tile.m, end=m)


@triton.jit
def rows_or_own(gathered, in_place, split, at, rank):
    """A tile's rows among all ranks', or in place where they are own."""
    source = gathered
    row = at.first
    if at.is_own:
        source = in_place
        row = at.first - rank * split.rank_rows
    return gemm.Rows(source=source, first=row, end=row + at.end - at.first)
