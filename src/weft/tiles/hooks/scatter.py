"""`emit`: a tile goes to the ranks that want it, or stays; data alone, no signal.

    push           another rank's tile -> its `partials`;  send: the same by TMA
    spread         an own tile -> every other rank's `gathered`;  send_to_all: the same by TMA
    stage          another rank's tile -> its chunk in this rank's memory, for a copy engine
    store_own      an own tile -> this rank's rows of the result
    unpack         `collect`: what `spread` has brought -> the result
    unpack_from    `collect`: what `push` has brought of another rank's rows -> the result

By TMA a tile leaves by one descriptor for each peer, by hop: a store that its consumer need not
wait for. Stores by threads held up every later release: a system's fence waits for all of an SM's.
Beyond `MOST_PEERS` peers, and in the template without such descriptors, threads store all the same.

Units  partials: [num_ranks, rows, n] on the owner, by source; gathered: [num_ranks * rows, n];
       staged: [num_ranks * chunks * rows of whole tiles, n / chunks], by owner
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

import weft.language as wl
from weft.tiles import fragments
from weft.tiles.hooks.partition import Owned, offsets, place_of, rows_of

# Descriptors that a kernel takes for them.
MOST_PEERS = 7
# Rows of a tile that are unpacked at once.
UNPACKED_ROWS = 64


@gluon.constexpr_function
def _are_described(peers, num_ranks):
    """Is there a descriptor for each peer?"""
    return peers is not None and num_ranks <= MOST_PEERS + 1


@triton.jit
def push(partials, parts, at, cells, fragment, rank, world):
    """Another rank's tile -> its partials, this rank's part of them."""
    value = fragments.in_registers(fragment)
    offset, mask = offsets(at, cells, value, parts)
    there = partials + place_of(rank, at, parts) + offset
    wl.put(world, there, value.to(partials.dtype.element_ty), to=at.owner, mask=mask)


@triton.jit
def send(partials, parts, peers, at, cells, fragment, rank, world, num_ranks: tl.constexpr):
    """As `push`, by TMA. peers: this rank's part of their `partials`, by hop, or None"""
    if _are_described(peers, num_ranks):
        hop = (at.owner + num_ranks - rank) % num_ranks
        for to in tl.static_range(1, num_ranks):
            if hop == to:
                _store_rows(peers[to - 1], at, cells, fragment, parts)
    else:
        push(partials, parts, at, cells, fragment, rank, world)


@triton.jit
def spread(gathered, parts, at, cells, fragment, rank, world, num_ranks: tl.constexpr):
    """An own tile -> `gathered` of every other rank, at its place among all rows."""
    if at.row < at.end:
        value = fragments.in_registers(fragment).to(gathered.dtype.element_ty)
        offset, mask = offsets(at, cells, value, parts)
        there = gathered + place_of(at.owner, at, parts) + offset
        for hop in range(1, num_ranks):
            to = (rank + hop) % num_ranks
            wl.put(world, there, value, to=to, mask=mask)


@triton.jit
def send_to_all(gathered, parts, peers, at, cells, fragment, rank, world, num_ranks: tl.constexpr):
    """As `spread`, by TMA. peers: this rank's rows of their `gathered`, by hop, or None"""
    if _are_described(peers, num_ranks):
        if at.row < at.end:
            for to in tl.static_range(1, num_ranks):
                _store_rows(peers[to - 1], at, cells, fragment, parts)
    else:
        spread(gathered, parts, at, cells, fragment, rank, world, num_ranks)


@triton.jit
def store(c, cells, fragment, shape):
    """A tile -> C, rounded to C's dtype. shape: gemm.Shape"""
    fragments.store_block(c, cells.row, cells.column, fragment, shape.m, shape.n, shape.stride_c)


@triton.jit
def store_own(c, parts, at, cells, fragment):
    """An own tile -> C, which holds this rank's part of the rows."""
    if at.row < at.end:
        _store_rows(c, at, cells, fragment, parts)


@triton.jit
def _store_rows(target, at, cells, fragment, parts):
    """A tile -> a rank's part of rows that begin at `target`."""
    fragments.store_block(target, at.row + cells.tile_row, cells.column, fragment, at.end, parts.n,
                          parts.n)  # fmt: skip


@triton.jit
def stage(staged, parts, at, cells, fragment):
    """Another rank's tile -> its chunk in `staged`, whose parts have whole tiles alone."""
    of_columns = at.i_n // parts.chunk_n
    above = (at.owner * (parts.chunks - 1) + of_columns) * parts.tiles_m * parts.tile_m
    column = cells.column - of_columns * parts.chunk_n * parts.tile_n
    width = parts.n // parts.chunks
    first = above + at.i_m * parts.tile_m
    fragments.store_block(staged, first + cells.tile_row, column, fragment, first + at.end - at.row,
                          width, width)  # fmt: skip


@triton.jit
def unpack_from(received, out, parts, at, tile_m: tl.constexpr, tile_n: tl.constexpr):
    """What rank at.owner has sent of its own rows, where this rank has tile `at` for it -> its
    place among all rows."""
    theirs = Owned(at.i_m, at.i_n, at.owner, at.row, rows_of(at.owner, parts))
    unpack(received, out, parts, theirs, tile_m, tile_n)


@gluon.constexpr_function
def _rows_at_once(rows):
    return min(rows, UNPACKED_ROWS)


@gluon.constexpr_function
def _columns_at_once(columns):
    """As many as are a power of two."""
    return columns & -columns


@triton.jit
def unpack(gathered, out, parts, at, tile_m: tl.constexpr, tile_n: tl.constexpr):
    """Another rank's tile of tile_m x tile_n, as it came -> its place among all rows."""
    n = fragments.aligned(parts.n)
    place = place_of(at.owner, at, parts)
    height: tl.constexpr = _rows_at_once(tile_m)
    width: tl.constexpr = _columns_at_once(tile_n)
    i, j = fragments.block_index(height, width)
    for row in range(0, tile_m, height):
        for inside in tl.static_range(0, tile_n, width):
            column = at.i_n * tile_n + inside + j
            mask = (row + i < at.end - at.row)[:, None] & (column < n)[None, :]
            offset = (row + i)[:, None] * n + column[None, :]
            value = tl.load(gathered + place + offset, mask=mask)
            tl.store(out + place + offset, value, mask=mask)
