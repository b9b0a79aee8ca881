"""Products of groups: C[slot, :] = A[token_of[slot], :] @ B[expert of slot], by tables of tiles.

Which rows belong to which expert is known on the device alone. A table says what each tile is
(weft.tiles.route makes it), and the GEMM template runs it with these hooks, for as many rows of
tiles as a word on the device says:

    gemm.gemm(b, shape, tile, tl.load(num_tiles), first, step,
              grouped.in_turn, grouped.Turns(..),         the tile's record, by the tables
              ready, ..,                                  waits for ranks at.lo .. at.hi, then
                                                          gives grouped.rows_by_token(..)
              grouped.emit_slots, gemm.Stored(c, shape))  or where else its rows belong

The record is made once for each tile, by `in_turn`, and every later hook gets it: none looks an
expert up again. B holds the experts one behind the other, [experts, k, n] or [experts, n, k].
Rows of A are loaded by index, so without TMA.

Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles import gemm, swizzle


class At(NamedTuple):
    """Tile i_m of the table: slots first .. end - 1 of `expert`, of tokens of ranks lo .. hi."""

    i_m: Any
    i_n: Any
    expert: Any
    first: Any
    end: Any
    lo: Any
    hi: Any


class Slots(NamedTuple):
    """Arguments of `read_slots`."""

    source: Any


class Turns(NamedTuple):
    """Arguments of `in_turn`. tiles: int32[5, room] expert, first, end, lo, hi; turns: int32[room]
    the tile that comes i-th; group_m tiles share columns in L2."""

    tiles: Any
    turns: Any
    room: Any
    group_m: Any


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
def rows_by_token(at, source, token_of):
    """A tile's rows: those of its tokens in `source`, and its expert's B."""
    return gemm.Indexed(source, token_of, at.first, at.end, at.expert)


@triton.jit
def read_slots(at, segment, tile, args):
    """A tile's rows where they lie by slot, there from the start. args: Slots"""
    return gemm.Sliced(args.source, at.first, at.end, at.expert)


@triton.jit
def emit_slots(at, value, tile, args):
    """Store the tile in C, whose rows are slots, rounded to C's dtype. args: gemm.Stored"""
    i = at.first + tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    pointers = args.c + i.to(tl.int64)[:, None] * args.shape.stride_c + j[None, :]
    mask = (i < at.end)[:, None] & (j < args.shape.n)[None, :]
    tl.store(pointers, value.to(args.c.dtype.element_ty), mask=mask)
