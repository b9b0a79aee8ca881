"""The order of tiles where ranks lie on several nodes: node by node, rank by rank within each.

A bijection of 0 .. num_m * num_n - 1 onto At(i_m, i_n), like those of swizzle.py; `.fn` is the same
function on Python integers. Every node has as many ranks as the others, one behind the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from weft.tiles.swizzle import At


class Hierarchy(NamedTuple):
    """Arguments of `by_node`: rows of tiles that share columns, who asks, how many, how many to a
    node; `is_scatter` is 1 or 0."""

    group_m: Any
    rank: Any
    num_ranks: Any
    per_node: Any
    is_scatter: Any


@triton.jit
def by_node(i, num_m, num_n, args):
    """Own node's tiles, then the next node's, and so on; or that from the end. args: Hierarchy

    Gather: own tiles, the others of this node, then the next node's: near rows arrive first.
    Scatter: the same backwards, so that what has the longest way leaves first, and own come last.
    Within a node from the own place on, so that not all ranks reach for the same one. Rank r's rows
    of tiles are r * num_m // num_ranks and on: theirs, where parts are cut into as many tiles each;
    where a tile straddles two ranks' rows, about.
    """
    row = 0
    column = 0
    before = 0  # tiles of ranks that were visited
    per_node = args.per_node
    for j in range(args.num_ranks):
        hop = j + args.is_scatter * (args.num_ranks - 1 - 2 * j)
        node = (args.rank // per_node + hop // per_node) % (args.num_ranks // per_node)
        rank = node * per_node + (args.rank + hop) % per_node
        first = rank * num_m // args.num_ranks
        rows = (rank + 1) * num_m // args.num_ranks - first
        # Arithmetic, not branches: the same text serves integers and traced scalars.
        inside = i - before
        is_here = min(max(inside + 1, 0), 1) * min(max(rows * num_n - inside, 0), 1)
        inside = inside * is_here
        group = inside // (args.group_m * num_n)
        height = max(min(rows - group * args.group_m, args.group_m), 1)
        inside = inside - group * args.group_m * num_n
        row += is_here * (first + group * args.group_m + inside % height)
        column += is_here * (inside // height)
        before += rows * num_n
    return At(row, column)
