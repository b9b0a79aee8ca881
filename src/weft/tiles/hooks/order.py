"""Orders of tiles that are cut within each rank's part of the rows (partition.py).

scattered      first other ranks' tiles, then own ones between them, each some time after the
               others have come to it: so the links are used alike all the time
part_by_part   where copy engines carry tiles: chunk by chunk the parts of rank + 1, + 2, ...,
               own tiles last
other_parts    of these all but the own ones, one chunk by itself; own_part: the own ones
exchanged      where a tile's columns have an owner and its rows are this rank's: as scattered
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles.hooks.partition import Owned, rows_of

# So many times the own tiles that were asked for at the end are not too many, to share columns.
MOST_BEHIND = 3


class Scatter(NamedTuple):
    """Arguments of `scattered`."""

    rank: Any
    parts: Any


class Others(NamedTuple):
    """Arguments of `other_parts`."""

    rank: Any
    parts: Any
    num_ranks: Any


@triton.jit
def own_place(program):
    """A program's place among all."""
    return program


@triton.jit
def arrange(rank, parts):
    return Scatter(rank, parts)


@triton.jit
def scattered(i, num_m, num_n, args):
    """Tile after tile of the parts of rank + 1, + 2, ..., own ones between them. args: Scatter

    num_m is num_ranks * tiles_m. An own tile comes behind the same tile of all other parts, so no
    program waits for one that is later in its own rank's order.
    """
    parts = args.parts
    num_ranks = num_m // parts.tiles_m
    tiles = parts.tiles_m * num_n
    middle = num_m * num_n - parts.lead - parts.tail
    each = max(middle, 1)
    # Own tiles before the i-th, and before the one behind it.
    begun = min(max(i - parts.lead, 0), middle) * (tiles - parts.tail) // each
    begun += max(i - parts.lead - middle, 0)
    done = min(max(i + 1 - parts.lead, 0), middle) * (tiles - parts.tail) // each
    done += max(i + 1 - parts.lead - middle, 0)
    is_own = done - begun
    others = max(num_ranks - 1, 1)
    tile = begun * is_own + (i - begun) // others * (1 - is_own)
    hop = ((i - begun) % others + 1) * (1 - is_own)
    owner = (args.rank + hop) % num_ranks
    group = tile // (parts.group_m * num_n)
    inside = tile % (parts.group_m * num_n)
    height = min(parts.tiles_m - group * parts.group_m, parts.group_m)
    row = group * parts.group_m + inside % height
    end = rows_of(owner, parts)
    return Owned(owner * parts.tiles_m + row, inside // height, owner, row * parts.tile_m, end)


@triton.jit
def exchanged(i, num_m, num_n, args):
    """Tile after tile of the columns of rank + 1, + 2, ..., as `scattered`, own columns last. All
    tiles are of this rank's rows; num_n counts those of an owner's columns. args: Scatter"""
    at = scattered(i, num_m, num_n, args)
    return Owned(at.i_m, at.i_n, at.owner, at.row, rows_of(args.rank, args.parts))


@triton.jit
def part_by_part(i, num_m, num_n, args):
    """Tile after tile of a chunk, chunk after chunk of the parts of rank + 1, + 2, ...; own ones
    last. args: Scatter

    What engines carry is needed by the last tiles alone; each rank sends to another meanwhile.
    """
    parts = args.parts
    num_ranks = num_m // parts.tiles_m
    tiles = parts.tiles_m * num_n
    owner = (args.rank + 1 + i // tiles) % num_ranks
    return _in_part(owner, i % tiles, num_n, parts)


@triton.jit
def arrange_others(rank, parts, num_ranks: tl.constexpr):
    return Others(rank, parts, num_ranks)


@triton.jit
def other_parts(i, num_m, num_n, args):
    """Tile after tile of the parts of rank + 1, + 2, ..; no own ones. args: Others"""
    tiles = args.parts.tiles_m * num_n
    owner = (args.rank + 1 + i // tiles) % args.num_ranks
    return _in_part(owner, i % tiles, num_n, args.parts)


@triton.jit
def own_part(i, num_m, num_n, args):
    """Own tiles, chunk after chunk. args: Scatter"""
    return _in_part(args.rank, i, num_n, args.parts)


@triton.jit
def _in_part(owner, tile, num_n, parts):
    """Tile number `tile` of a rank's part, chunk after chunk."""
    chunk = tile // (parts.tiles_m * parts.chunk_n)
    tile -= chunk * parts.tiles_m * parts.chunk_n
    width = min(num_n - chunk * parts.chunk_n, parts.chunk_n)
    group = tile // (parts.group_m * width)
    inside = tile % (parts.group_m * width)
    height = min(parts.tiles_m - group * parts.group_m, parts.group_m)
    row = group * parts.group_m + inside % height
    end = rows_of(owner, parts)
    column = chunk * parts.chunk_n + inside // height
    return Owned(owner * parts.tiles_m + row, column, owner, row * parts.tile_m, end)


def order_of(
    num_ranks: int, tiles: int, num_programs: int, last: int, group: int
) -> tuple[int, int]:
    """`lead` and `tail` for so many tiles to a part; a group of its rows of tiles has `group`.

    Programs run side by side, and a tile is stored while the next is multiplied: what is waited for
    is two turns of all programs ahead. `last` is how many turns' worth of other ranks' tiles the
    own tiles at the end stand for.

    Own tiles that are whole groups behind the others are in their columns, and B is read once for
    both; so that is how far behind they are, unless it makes far more of them the last.
    """
    others, ahead = num_ranks - 1, 2 * num_programs
    tail = max(1, min(tiles, -(-last * num_programs // max(others, 1))))
    behind = max(1, tail // max(group, 1)) * max(group, 1)
    is_ahead = 4 * others * behind >= 3 * ahead
    if num_ranks == 1 or num_ranks * tiles * tiles >= 1 << 31:
        tail = tiles
    elif is_ahead and behind < tiles and behind <= MOST_BEHIND * tail:
        return others * behind, behind
    return (others * tiles if tail == tiles else min(ahead, others * tiles)), tail
