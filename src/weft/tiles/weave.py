"""What operators weave into the GEMM template: whose a tile is, and how it moves between ranks.

Tiles are cut within each rank's part of the rows (`tiles_m` rows of tiles to a part, the last of
them ragged or empty), so that a tile has one owner:

    scattered      the order: first other ranks' tiles, then own ones between them, each some time
                   after the others have come to it: so the links are used alike all the time
    read_owned     where a tile's rows of A lie
    push           another rank's tile -> its `partials`
    add_partials   an own tile's sums + those of the other ranks: rank + 1, + 2, ..., always so
    spread         an own tile -> every other rank's `gathered`;  unpack: from there -> the result

Where copy engines carry tiles, a part's columns are cut in `chunks`, each of which lies in one
piece, so that an engine moves it as one and all rows share columns meanwhile:

    part_by_part   the order: chunk by chunk the parts of rank + 1, + 2, ..., own tiles last
    keep           another rank's tile -> its chunk in this rank's memory
    add_carried    as add_partials, of chunks

On Hopper a tile leaves by TMA: a store that its consumer need not wait for, to one descriptor for
each peer, by hop. Stores by threads held up every later release: a system's fence waits for all
of an SM's. Beyond `MOST_PEERS` peers, tiles leave by them all the same.

Data alone: who waits for what and who is told is written where the hooks are, with the signals'
names. `word_of` is the mapping from a tile to its signal. Functions with `chunk` in their name are
the same for the template for Hopper, which hands out a tile in chunks.

Units  partials: [num_ranks, rows, n] on the owner, by source, or [num_ranks, chunks, rows,
       n / chunks]; gathered: [num_ranks * rows, n]; kept: [num_ranks * chunks * rows of whole
       tiles, n / chunks], by owner
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.tiles import epilogues, gemm, gemm_sm90

# Descriptors that a kernel takes for them.
MOST_PEERS = 7
# So many times the own tiles that were asked for at the end are not too many, to share columns.
MOST_BEHIND = 3
# Elements that a thread moves at once: 16 bytes of 16 bits. Rows begin at multiples of them.
VECTOR = gl.constexpr(8)
# Rows of a tile that four warps unpack at once.
UNPACKED_ROWS = gl.constexpr(64)

_block_columns = gluon.constexpr_function(gemm_sm90.block_columns)


class Parts(NamedTuple):
    """How m rows of n elements are split and cut: `rows` to a rank, `tiles_m` rows of tiles to
    each part, num_n tiles in each, `words` signals to a tile. `lead` tiles come before the first
    own one, and the last `tail` are own ones, 1 at least: `order_of` gives both. For engines
    columns are in `chunks` of chunk_n tiles each; where there are several they are alike."""

    m: Any
    n: Any
    rows: Any
    tile_m: Any
    tile_n: Any
    tiles_m: Any
    num_n: Any
    words: Any
    lead: Any
    tail: Any
    group_m: Any
    chunks: Any
    chunk_n: Any


class Owned(NamedTuple):
    """A tile of rank `owner`: from row `row` of its part on, of which there are `end`."""

    i_m: Any
    i_n: Any
    owner: Any
    row: Any
    end: Any


class Scatter(NamedTuple):
    """Arguments of `scattered`."""

    rank: Any
    parts: Any


class Operand(NamedTuple):
    """Arguments of `read_owned`."""

    a: Any
    parts: Any


class Move(NamedTuple):
    """Arguments of what moves a tile; any record with these fields will do."""

    partials: Any
    rank: Any
    parts: Any
    world: Any


# ---------------------------------------------------------------------------------------------
# The mapping


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
    end = min(max(parts.m - owner * parts.rows, 0), parts.rows)
    return Owned(owner * parts.tiles_m + row, inside // height, owner, row * parts.tile_m, end)


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
    tile = i % tiles
    chunk = tile // (parts.tiles_m * parts.chunk_n)
    tile -= chunk * parts.tiles_m * parts.chunk_n
    width = min(num_n - chunk * parts.chunk_n, parts.chunk_n)
    group = tile // (parts.group_m * width)
    inside = tile % (parts.group_m * width)
    height = min(parts.tiles_m - group * parts.group_m, parts.group_m)
    row = group * parts.group_m + inside % height
    end = min(max(parts.m - owner * parts.rows, 0), parts.rows)
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


@triton.jit
def word_of(signals, at, part, source, num_ranks, parts):
    """The word that says: `source` has done its share of this tile, or of this part of it."""
    tile = (at.i_m % parts.tiles_m) * parts.num_n + at.i_n
    return signals + (tile * parts.words + part) * num_ranks + source


@triton.jit
def chunk_of(at, rank, parts):
    """Which of all ranks' chunks has this tile's columns, of those of `rank`."""
    return rank * parts.chunks + at.i_n // parts.chunk_n


@triton.jit
def is_last_of_chunk(counters, stored, at, parts):
    """Count `stored` parts of a tile as stored; have all others of its chunk been here? All they
    did comes before what follows."""
    counter = counters + chunk_of(at, at.owner, parts)
    # weft: equivalent-mutant drop of complete_stores: the template has completed them
    done = wl.atomic_add(counter, stored, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE) + stored
    first = at.i_n // parts.chunk_n * parts.chunk_n
    columns = min(parts.num_n - first, parts.chunk_n)
    is_last = done == parts.tiles_m * columns * parts.words
    if is_last:
        # Nobody counts any more: the next call's programs come later in stream order.
        tl.store(counter, 0)
    return is_last


@triton.jit
def read_owned(at, segment, tile, args):
    """A is there from the start. args: Operand"""
    first = at.owner * args.parts.rows
    return gemm.Rows(source=args.a, first=first + at.row, end=first + at.end)


@triton.jit
def place_of(index, at, parts):
    """Where the owner's rows begin among `rows` elements of n for each `index`."""
    return (tl.cast(index, tl.int64) * parts.rows + at.row) * parts.n


# ---------------------------------------------------------------------------------------------
# A whole tile


@triton.jit
def cells(at, tile, parts):
    """Offsets of a tile's elements from its first row's begin, and which there are."""
    i = tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    mask = (i < at.end - at.row)[:, None] & (j < parts.n)[None, :]
    return i.to(tl.int64)[:, None] * parts.n + j[None, :], mask


@triton.jit
def store_owned(c, at, value, tile, parts):
    """An own tile -> C, which holds this rank's part of the rows."""
    offset, mask = cells(at, tile, parts)
    tl.store(c + place_of(0, at, parts) + offset, value.to(c.dtype.element_ty), mask=mask)


@triton.jit
def push(at, value, tile, args):
    """Another rank's tile -> its partials, this rank's part of them. args: Move"""
    offset, mask = cells(at, tile, args.parts)
    there = args.partials + place_of(args.rank, at, args.parts) + offset
    wl.put(args.world, there, value.to(args.partials.dtype.element_ty), to=at.owner, mask=mask)


@triton.jit
def spread(gathered, at, value, tile, args):
    """An own tile -> `gathered` of every other rank, at its place among all rows. args: Move"""
    offset, mask = cells(at, tile, args.parts)
    there = gathered + place_of(at.owner, at, args.parts) + offset
    for hop in range(1, args.world.num_ranks):
        to = (args.rank + hop) % args.world.num_ranks
        wl.put(args.world, there, value.to(gathered.dtype.element_ty), to=to, mask=mask)


@triton.jit
def unpack(out, gathered, at, tile, parts):
    """Another rank's tile, as it came -> its place among all rows."""
    offset, mask = cells(at, tile, parts)
    offset += place_of(at.owner, at, parts)
    tl.store(out + offset, tl.load(gathered + offset, mask=mask), mask=mask)


@triton.jit
def _cells_of_chunk(at, tile, parts):
    """As `cells`, of a tile's chunk: offsets are from its first row's begin there."""
    width = parts.n // parts.chunks
    i = tl.arange(0, tile.m)
    j = at.i_n % parts.chunk_n * tile.n + tl.arange(0, tile.n)
    mask = (i < at.end - at.row)[:, None] & (j < width)[None, :]
    return i.to(tl.int64)[:, None] * width + j[None, :], mask


@triton.jit
def keep(kept, at, value, tile, parts):
    """Another rank's tile -> its chunk in `kept`, whose parts have whole tiles alone."""
    offset, mask = _cells_of_chunk(at, tile, parts)
    first = chunk_of(at, at.owner, parts) * parts.tiles_m + at.i_m % parts.tiles_m
    place = tl.cast(first, tl.int64) * parts.tile_m * (parts.n // parts.chunks)
    tl.store(kept + place + offset, value.to(kept.dtype.element_ty), mask=mask)


@triton.jit
def add_carried(at, value, tile, args):
    """value + what engines have brought of the other ranks for this own tile. args: Move"""
    offset, mask = _cells_of_chunk(at, tile, args.parts)
    for hop in range(1, args.world.num_ranks):
        source = (args.rank + hop) % args.world.num_ranks
        first = tl.cast(chunk_of(at, source, args.parts), tl.int64) * args.parts.rows + at.row
        there = args.partials + first * (args.parts.n // args.parts.chunks) + offset
        value += tl.load(there, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def add_partials(at, value, tile, args):
    """value + what the other ranks have pushed for this own tile, in fp32. args: Move"""
    offset, mask = cells(at, tile, args.parts)
    for hop in range(1, args.world.num_ranks):
        source = (args.rank + hop) % args.world.num_ranks
        there = args.partials + place_of(source, at, args.parts) + offset
        value += tl.load(there, mask=mask, other=0.0).to(tl.float32)
    return value


# ---------------------------------------------------------------------------------------------
# Chunk by chunk


@gluon.jit
def chunk_cells(at, row, column, parts, rows: gl.constexpr, columns: gl.constexpr,
                layout: gl.constexpr):  # fmt: skip
    """As `cells`, for a chunk; offsets are from the tile's first row's begin."""
    # Rows begin at multiples of VECTOR; said by arithmetic, since a hint would not survive.
    n = parts.n // VECTOR * VECTOR
    i = row - at.i_m * parts.tile_m + gl.arange(0, rows, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, columns, gl.SliceLayout(0, layout))
    mask = (i < at.end - at.row)[:, None] & (j < n)[None, :]
    return i[:, None] * n + j[None, :], mask


@gluon.jit
def chunk_place(index, at, parts):
    """As `place_of`."""
    n = parts.n // VECTOR * VECTOR
    return (index.to(gl.int64) * parts.rows + at.row) * n


@gluon.jit
def push_chunk(at, row, column, chunk, args):
    """As `push`. args: Move"""
    layout: gl.constexpr = epilogues.layout_of_rows(chunk.shape[1], VECTOR)
    offset, mask = chunk_cells(at, row, column, args.parts, chunk.shape[0], chunk.shape[1], layout)
    there = wl.at(args.world, args.partials, at.owner) + chunk_place(args.rank, at, args.parts)
    gl.store(there + offset, chunk.load(layout), mask=mask)


@gluon.jit
def send_chunk(at, row, column, chunk, peers, args):
    """As `push_chunk`, by TMA. peers: by hop, this rank's part of their `partials`. args: Move"""
    num_ranks: gl.constexpr = args.world.num_ranks
    hop = (at.owner + num_ranks - args.rank) % num_ranks
    for to in gl.static_range(1, num_ranks):
        if hop == to:
            own_row = at.row + row - at.i_m * args.parts.tile_m
            gemm_sm90.store_tile(peers[to - 1], [own_row, column], chunk)


@gluon.jit
def send_chunk_to_all(at, row, column, chunk, peers, args):
    """As `spread_chunk`, by TMA. peers: by hop, this rank's rows of their `gathered`. args: Move"""
    num_ranks: gl.constexpr = args.world.num_ranks
    for to in gl.static_range(1, num_ranks):
        own_row = at.row + row - at.i_m * args.parts.tile_m
        gemm_sm90.store_tile(peers[to - 1], [own_row, column], chunk)


@gluon.jit
def spread_chunk(gathered, at, row, column, chunk, args):
    """As `spread`. args: Move"""
    layout: gl.constexpr = epilogues.layout_of_rows(chunk.shape[1], VECTOR)
    offset, mask = chunk_cells(at, row, column, args.parts, chunk.shape[0], chunk.shape[1], layout)
    value = chunk.load(layout)
    for hop in range(1, args.world.num_ranks):
        to = (args.rank + hop) % args.world.num_ranks
        there = wl.at(args.world, gathered, to) + chunk_place(at.owner, at, args.parts)
        gl.store(there + offset, value, mask=mask)


@gluon.jit
def unpack_rows(out, gathered, at, row, parts, rows: gl.constexpr, columns: gl.constexpr):
    """As `unpack`, for `rows` rows of a tile from `row` on; of a launch of 4 warps."""
    first, column = row + at.i_m * parts.tile_m, at.i_n * columns
    place = chunk_place(at.owner, at, parts)
    # As many columns at once as are a power of two.
    block: gl.constexpr = _block_columns(columns)
    layout: gl.constexpr = epilogues.layout_of_rows(block, VECTOR)
    for inside in gl.static_range(0, columns, block):
        offset, mask = chunk_cells(at, first, column + inside, parts, rows, block, layout)
        gl.store(out + place + offset, gl.load(gathered + place + offset, mask=mask), mask=mask)


@gluon.jit
def keep_chunk(kept, at, row, column, chunk, parts):
    """As `keep`, by TMA."""
    of_columns = at.i_n // parts.chunk_n
    above = (at.owner * (parts.chunks - 1) + of_columns) * parts.tiles_m * parts.tile_m
    column -= of_columns * parts.chunk_n * parts.tile_n
    gemm_sm90.store_tile(kept, [above + row, column], chunk)


@gluon.jit
def add_partial_chunks(at, row, column, value, args):
    """As `add_partials`. args: Move"""
    n = args.parts.n // VECTOR * VECTOR
    return _add_shares(at, row, column, value, args.partials + at.row.to(gl.int64) * n, n, args)


@gluon.jit
def add_carried_chunks(at, row, column, value, args):
    """As `add_carried`. args: Move"""
    of_columns = at.i_n // args.parts.chunk_n
    width = args.parts.n // args.parts.chunks // VECTOR * VECTOR
    first = args.partials + (of_columns.to(gl.int64) * args.parts.rows + at.row) * width
    column -= of_columns * args.parts.chunk_n * args.parts.tile_n
    return _add_shares(at, row, column, value, first, width, args)


@gluon.jit
def _add_shares(at, row, column, value, first, n, args):
    """value + the other ranks' shares; the tile's of rank 0 begins at `first`, in rows of n."""
    layout: gl.constexpr = value.type.layout
    i = row - at.i_m * args.parts.tile_m + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    # Columns are added last, in 64 bits: so they are constants of each load, and few of the loads'
    # addresses are kept over the hops, beside the sums. As offsets they did not fit in registers.
    j = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout)).to(gl.int64)
    mask = (i < at.end - at.row)[:, None] & (j < n - column)[None, :]
    for hop in range(1, args.world.num_ranks):
        source = (args.rank + hop) % args.world.num_ranks
        of_source = args.parts.n // VECTOR * VECTOR * args.parts.rows
        rows = first + source.to(gl.int64) * of_source + column + i.to(gl.int64) * n
        value += gl.load(rows[:, None] + j[None, :], mask=mask, other=0.0).to(gl.float32)
    return value
