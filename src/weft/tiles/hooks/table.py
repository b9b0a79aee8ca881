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
Rows of A that are loaded by index are loaded without TMA; those that lie by slot are not. A tile's
slots may end before it does, and those behind are another tile's: so results leave by stores of
threads, which have masks, and not by TMA. Before the product stands `feed` (feed.py), by which own
tokens come to all ranks; behind it, in the template for whole rows, `choices`, by which a token's
rows are added up.

Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.language import triton_api as api
from weft.tiles import fragments, gemm, swizzle

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
    L2; a rank's tokens come in `chunks`, each with a word: fed, by as many programs."""

    m: Any
    rows: Any
    top_k: Any
    room: Any
    columns: Any
    group_m: Any
    chunks: Any


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
    return record_at(tl.load(args.turns + place.i_m), place.i_n, args)


@triton.jit
def record_at(tile, i_n, args):
    """What the tables say of a tile."""
    field = args.tiles + tile
    return At(
        tile, i_n, tl.load(field), tl.load(field + args.room),
        tl.load(field + 2 * args.room), tl.load(field + 3 * args.room),
        tl.load(field + 4 * args.room),
    )  # fmt: skip


@triton.jit
def by_expert(i, num_m, num_n, args):
    """As `in_turn`, in the order of the table: tiles that share an expert's B are neighbours."""
    place = swizzle.grouped(i, num_m, num_n, (args.group_m,))
    return record_at(place.i_m, place.i_n, args)


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


class Choices(NamedTuple):
    """Where rows are sums of others: row `first` + i of `source`[slots, n], weighted, at the slots
    of token first + i, of which each token has top_k."""

    source: Any
    first: Any
    slot_of: Any
    weight_of: Any
    top_k: Any


@api.builtin
def is_chosen(rows, _semantic=None):
    return api.constexpr(api.tuple_fields(rows) == Choices._fields)


@triton.jit
def choices(products, slot_of, weight_of, top_k, parts, at):
    """A tile's tokens: each the sum of its slots' rows of `products`, times their weights."""
    first = at.owner * parts.rows + at.row
    return Choices(products, first, slot_of, weight_of, top_k)


@triton.jit
def add_choices(rows, n, num_rows, tile_m: tl.constexpr, tile_n: tl.constexpr):
    """Those sums in fp32, the first choice's row first, then the second's, ..; 0 outside of
    num_rows rows and n columns. A choice without a slot adds nothing. rows: Choices"""
    i, j = tl.arange(0, tile_m), tl.arange(0, tile_n)
    entry = (rows.first + i).to(tl.int64) * rows.top_k
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for first in range(0, rows.top_k, AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            here = (i < num_rows) & (first + each < rows.top_k)
            slot = tl.load(rows.slot_of + entry + first + each, mask=here, other=-1)
            here = slot >= 0  # it is not where an expert is another rank's
            weight = tl.load(rows.weight_of + slot, mask=here, other=0.0)
            there = rows.source + slot.to(tl.int64)[:, None] * n + j[None, :]
            row = tl.load(there, mask=here[:, None] & (j < n)[None, :], other=0.0)
            total += row.to(tl.float32) * weight[:, None]
    return total
