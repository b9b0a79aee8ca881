"""`ready` of rows of A that are a rank's own, or arrive from others; `done` behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles import gemm, swizzle


@triton.jit
def read_owned(a, parts, at):
    """A is there from the start."""
    first = at.owner * parts.rows
    return gemm.Rows(source=a, first=first + at.row, end=first + at.end)


class Arrival(NamedTuple):
    """Arguments of `rows_or_own`.

    Tuples come last, and no field is a constant: Triton 3.6 recomputes the type of a tuple when
    it fills in a field, and then forgets the constants of the tuples that follow.
    """

    own: Any
    gathered: Any
    words: Any
    e: Any
    rank: Any
    split: Any
    world: Any


@triton.jit
def rows_or_own(at, segment, tile, args):
    """Own rows are read in place; others once all their chunks have arrived. args: Arrival"""
    first = at.i_m * tile.m
    end = min(first + tile.m, args.split.rows)
    own_first, own_end = mapping.rows_of_rank(args.rank, args.split)
    is_own = (first >= own_first) & (end <= own_end)
    if not is_own:
        word = mapping.channel_of_row(first, args.split)
        count = mapping.channel_of_row(end - 1, args.split) - word + 1
        # Pairs with the copy engine's words, or with push_rows; a tile may straddle several chunks.
        wl.wait(args.words + word, args.e, count, world=args.world)
    source = args.gathered
    row = first
    if is_own:
        source = args.own
        row = first - own_first
    return gemm.Rows(source=source, first=row, end=row + end - first)


@triton.jit
def first_row(rank, split, tile_m):
    """The row of tiles to begin with: the first of own rows alone."""
    own_first, own_end = mapping.rows_of_rank(rank, split)
    return swizzle.first_to_gather(own_first, own_end, tile_m, tl.cdiv(split.rows, tile_m))


@triton.jit
def variable(number):
    """A number that Triton may take for a constant, 1 say, as one that it does not."""
    return tl.cast(number, tl.int32)


class Done(NamedTuple):
    """Arguments of `give_back` and `await_words_and_give_back`, in this order for the reason told
    at Arrival: `num_words` words of rows, for which one program waits."""

    words: Any
    e: Any
    num_words: Any
    program: Any
    num_programs: Any
    slot: Any
    world: Any


@triton.jit
def give_back(args):
    """This program has read all that it will. args: Done"""
    # weft: equivalent-mutant drop of complete_stores: only stores of c are asynchronous, which are
    # complete when the kernel has ended, and which no other rank reads
    # weft: equivalent-mutant incomplete of notify: only stores of c are asynchronous, as above
    slots.slot_finish(args.world, args.slot, args.e, args.num_programs)


@triton.jit
def await_words_and_give_back(args):
    """One program first: no engine writes a word of this call any more. args: Done"""
    if args.program == args.num_programs - 1:
        # Also chunks without rows: copied after the slot was given back, a word would be one of the
        # next call, and of another chunk if that has more of them. And what began the copies has
        # read the epoch, which ends with this call.
        wl.wait(args.words, args.e, args.num_words, world=args.world)
    give_back(args)
