"""Products of groups: C[slot, :] = A[token_of[slot], :] @ B[expert of slot], by tables of tiles.

Which rows belong to which expert is known on the device alone. A table says what each tile is
(weft.tiles.route makes it), and the GEMM template runs it with these hooks, for as many rows of
tiles as a word on the device says:

    count    num_tiles(routing, experts)
    order    in_turn                          the tile's record, by the tables
    ready    wait_sources(..)                 waits for ranks at.lo .. at.hi
             rows_by_token(gathered, ..)
    emit     store_slots(c)                   or where else its rows belong

The record is made once for each tile, by `in_turn`, and every later hook gets it: none looks an
expert up again. B holds the experts one behind the other, [experts, k, n] or [experts, n, k].
Rows of A are loaded by index, so without TMA. A tile's slots may end before it does, and those
behind are another tile's: so results leave by stores of threads, which have masks, and not by TMA.
Around the product stand `feed` (feed.py), by which own tokens come to all ranks, and `push_rows`
and `sum_rows`, by which weighted rows go back to their tokens'.

Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments, gemm, swizzle

# Columns that are added up at a time.
SUMMED = tl.constexpr(2048)
# Choices of a token that are asked for before the first of them has come.
AT_ONCE = tl.constexpr(4)


class Tables(NamedTuple):
    """Those of a router's tables (weft.ops.moe_route) that kernels ask, on the device."""

    token_of: Any
    weight_of: Any
    slot_of: Any
    tiles: Any
    turns: Any
    num_tiles: Any

    @classmethod
    def of(cls, routing: Any) -> Tables:
        """Those of what weft.ops.moe_route gave."""
        return cls(*[getattr(routing.tables, name) for name in cls._fields])


class Experts(NamedTuple):
    """Numbers beside the tables: m tokens, `rows` to a rank, each with top_k choices; tables have
    room for `room` tiles, of `columns` columns of tiles, of which group_m rows share columns in
    L2; `channels` programs feed."""

    m: Any
    rows: Any
    top_k: Any
    room: Any
    columns: Any
    group_m: Any
    channels: Any


class At(NamedTuple):
    """Tile i_m of the table: slots first .. end - 1 of `expert`, of tokens of ranks lo .. hi."""

    i_m: Any
    i_n: Any
    expert: Any
    first: Any
    end: Any
    lo: Any
    hi: Any


class Turns(NamedTuple):
    """Arguments of `in_turn`. tiles: int32[5, room] expert, first, end, lo, hi; turns: int32[room]
    the tile that comes i-th; group_m tiles share columns in L2."""

    tiles: Any
    turns: Any
    room: Any
    group_m: Any


@triton.jit
def arrange(routing, experts):
    """By the tables' turns. routing: Tables; experts: Experts"""
    return Turns(routing.tiles, routing.turns, experts.room, experts.group_m)


@triton.jit
def num_tiles(routing, experts):
    """How many tiles the tables say that there are; of a number that is wrong, as many as they have
    room for. routing: Tables; experts: Experts"""
    return tl.minimum(tl.load(routing.num_tiles), experts.room)


@triton.jit
def num_sources(at, num_ranks):
    """How many ranks have tokens of a tile, or may have: no table makes it more than there are."""
    return tl.minimum(at.hi + 1, num_ranks) - at.lo


@triton.jit
def in_turn(i, num_m, num_n, args):
    """The i-th tile's record. num_m: how many tiles there are; args: Turns"""
    place = swizzle.grouped(i, num_m, num_n, (args.group_m,))
    tile = tl.load(args.turns + place.i_m)
    field = args.tiles + tile
    return At(
        tile, place.i_n, tl.load(field), tl.load(field + args.room),
        tl.load(field + 2 * args.room), tl.load(field + 3 * args.room),
        tl.load(field + 4 * args.room),
    )  # fmt: skip


@triton.jit
def in_turn_backwards(i, num_m, num_n, args):
    """As `in_turn`, from the last turn to the first: tiles of other ranks' tokens first."""
    return in_turn(num_m * num_n - 1 - i, num_m, num_n, args)


@triton.jit
def rows_by_token(source, token_of, at):
    """A tile's rows: those of its tokens in `source`, and its expert's B."""
    return gemm.Indexed(source, token_of, at.first, at.end, at.expert)


@triton.jit
def read_slots(source, at):
    """A tile's rows where they lie by slot, there from the start."""
    return gemm.Sliced(source, at.first, at.end, at.expert)


@triton.jit
def store_slots(c, at, cells, fragment, num_columns):
    """Store the tile in c[slots, num_columns], rounded to c's dtype."""
    fragments.store_block(c, at.first + cells.tile_row, cells.column, fragment, at.end,
                          num_columns, num_columns)  # fmt: skip


@triton.jit
def store_value(c, at, cells, value, num_columns):
    """The same of what was made of the tile, which the fragment does not hold."""
    store_slots(c, at, cells, value, num_columns)


@triton.jit
def _choice_of(slot, token, slot_of, top_k, mask):
    """Which of its token's choices a slot is."""
    found = tl.zeros_like(slot)
    for first in range(0, top_k, AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            j = first + each
            there = mask & (j < top_k)
            same = tl.load(slot_of + token * top_k + j, mask=there, other=-1) == slot
            found += tl.where(same, j, 0)
    return found


@triton.jit
def push_rows(
    partials, routing, experts, at, cells, fragment, rank, shape, world, num_ranks: tl.constexpr
):
    """Each row, times its weight -> rank's part of `partials` of the rank whose token it is.

    partials: [num_ranks, rows of a rank, top_k, n]; routing: Tables
    """
    value, n = fragment, shape.n
    slot = at.first + cells.tile_row + fragments.index(value, 0)
    here = slot < at.end
    token = tl.load(routing.token_of + slot, mask=here, other=0)
    weight = tl.load(routing.weight_of + slot, mask=here, other=0.0)
    j = cells.column + fragments.index(value, 1)
    owner = token // experts.rows
    row = (token - owner * experts.rows) * experts.top_k
    row += _choice_of(slot, token, routing.slot_of, experts.top_k, here)
    place = (rank * experts.rows * experts.top_k + row).to(tl.int64) * n
    there = partials + place[:, None] + j[None, :]
    share = (value * weight[:, None]).to(partials.dtype.element_ty)
    for to in range(at.lo, at.lo + num_sources(at, num_ranks)):
        mask = (here & (owner == to))[:, None] & (j < n)[None, :]
        wl.put(world, there, share, to=to, mask=mask)


@triton.jit
def sum_rows(partials, out, experts, rank, shape, program, num_programs, num_ranks: tl.constexpr):
    """Own tokens, one by one: all ranks' shares of all choices, in fp32; own ones first, then rank
    + 1's, ..; of each the first choice's, the second's, .."""
    n = shape.n
    own = tl.minimum(tl.maximum(experts.m - rank * experts.rows, 0), experts.rows)
    pieces = tl.cdiv(n, SUMMED)
    for unit in range(program, own * pieces, num_programs):
        token = unit // pieces
        column = (unit - token * pieces) * SUMMED + tl.arange(0, SUMMED)
        total = tl.zeros((SUMMED,), tl.float32)
        for hop in range(num_ranks):
            source = (rank + hop) % num_ranks
            row = (source * experts.rows + token) * experts.top_k
            for first in range(0, experts.top_k, AT_ONCE):
                for each in tl.static_range(AT_ONCE):
                    j = first + each
                    there = partials + (row + j).to(tl.int64) * n + column
                    mask = (column < n) & (j < experts.top_k)
                    total += tl.load(there, mask=mask, other=0.0).to(tl.float32)
        place = out + token.to(tl.int64) * n + column
        tl.store(place, total.to(out.dtype.element_ty), mask=column < n)
