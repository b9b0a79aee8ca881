"""Kernels of plans that multiply nothing: rows on their way, and what streams say and wait for.

Not an operator. `split` is a weft.language.mapping.StaticMapping: rows over ranks, each rank's in
chunks that have a word each. All words are set to the call's epoch e.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles.hooks import feed


@triton.jit
def _copied(world, target, source, first, begin, end, columns, to, program, num_programs,
            block: tl.constexpr):  # fmt: skip
    """Rows begin .. end - 1, which `source` has from row `first` on -> `target` on `to`."""
    size = (end - begin).to(tl.int64) * columns
    feed.store_piece(world, target, source, begin.to(tl.int64) * columns,
                     first.to(tl.int64) * columns, size, program, num_programs, to,
                     block)  # fmt: skip


@triton.jit
def _set_own_words(own_words, num_own, e, rank, world):
    """The words that engines will take to the others behind own rows."""
    for i in range(num_own):
        # Read here alone, by engines behind this program and by who waits for it.
        wl.notify(world, own_words + rank * num_own + i, e, to=rank, op=wl.SignalOp.SET,
                  scope=wl.Scope.DEVICE)  # fmt: skip


@triton.jit
def stage(source, target, own_words, num_own, slot, split, columns, takes, world,
          block: tl.constexpr):  # fmt: skip
    """Own rows -> the own slot, where tiles read them with others'.

    own_words: those that an engine will take to peers behind own rows
    """
    e = slots.slot_epoch(slot)
    if takes:
        slots.slot_wait_free(world, slot, e)
    rank = wl.rank(world).to(tl.int32)
    if tl.program_id(0) == 0:
        # weft: equivalent-mutant relax-release, narrow of notify: the product and the engines,
        # which read these words, come behind this kernel in stream order
        _set_own_words(own_words, num_own, e, rank, world)
    first, end = mapping.rows_of_rank(rank, split)
    _copied(world, target, source, first, first, end, columns, rank, tl.program_id(0),
            tl.num_programs(0), block)  # fmt: skip


@triton.jit
def edges(source, target, slot, split, columns, takes: tl.constexpr, world, tile_rows,
          block: tl.constexpr):  # fmt: skip
    """Own rows -> the own slot, as far as they lie in tiles that others' rows lie in too."""
    if takes:
        # weft: equivalent-mutant drop, relax-acquire, value-1, count-1 of wait: it guards rows that
        # others fetch from this memory in calls of another operator, never in this one's
        slots.slot_wait_free(world, slot, slots.slot_epoch(slot))
    rank = wl.rank(world).to(tl.int32)
    first, end = mapping.rows_of_rank(rank, split)
    upto = min(tl.cdiv(first, tile_rows) * tile_rows, end)
    begin = max(end // tile_rows * tile_rows, upto)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    _copied(world, target, source, first, first, upto, columns, rank, program, num_programs, block)
    _copied(world, target, source, first, begin, end, columns, rank, program, num_programs, block)


@triton.jit
def push(source, target, words, slot, split, columns, takes, world, by_node: tl.constexpr,
         block: tl.constexpr):  # fmt: skip
    """A program for each rank and chunk: its rows -> that rank's slot, then its word there.

    Own ones too, for tiles that straddle ranks.
    """
    e = slots.slot_epoch(slot)
    if takes:
        slots.slot_wait_free(world, slot, e)
    rank = wl.rank(world).to(tl.int32)
    first, end = mapping.rows_of_rank(rank, split)
    unit = tl.program_id(0)
    to = feed.receiver(unit // split.chunks, rank, world, by_node)
    chunk = unit % split.chunks
    begin = min(first + chunk * split.chunk_rows, end)
    _copied(world, target, source, first, begin, min(begin + split.chunk_rows, end), columns, to,
            0, 1, block)  # fmt: skip
    word = words + rank * split.chunks + chunk
    wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def push_parts(source, target, words, slot, split, columns, takes, world, width: tl.constexpr,
               height: tl.constexpr):  # fmt: skip
    """A program for each chunk and rank: that rank's rows of own columns -> its slot, among other
    ranks' columns; then its word there. Of own rows the word alone: they are read in place.

    height x width elements at a time
    """
    e = slots.slot_epoch(slot)
    if takes:
        slots.slot_wait_free(world, slot, e)
    rank, num_ranks = wl.rank(world).to(tl.int32), world.num_ranks
    unit = tl.program_id(0)
    chunk = unit // num_ranks
    to = (rank + num_ranks - unit % num_ranks) % num_ranks
    if to != rank:
        first, end = mapping.rows_of_rank(to, split)
        begin = min(first + chunk * split.chunk_rows, end)
        end = min(begin + split.chunk_rows, end)
        stride = tl.cast(columns, tl.int64) * num_ranks
        there = target + rank * columns - first * stride
        for row in range(begin, end, height):
            i = row + tl.arange(0, height)
            for column in range(0, columns, width):
                j = column + tl.arange(0, width)
                mask = (i < end)[:, None] & (j < columns)[None, :]
                value = tl.load(source + i.to(tl.int64)[:, None] * columns + j[None, :], mask=mask)
                wl.put(world, there + i[:, None] * stride + j[None, :], value, to=to, mask=mask)
    if num_ranks > 1:  # one alone waits for nobody
        wl.notify(world, words + rank * split.chunks + chunk, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def wait_all(words, num_words, slot, world):
    """One program: wait until every rank has announced all that it has, be it nothing."""
    wl.wait(words, slots.slot_epoch(slot), num_words, world=world)


@triton.jit
def take(own_words, num_own, slot, world):
    """One program: wait until the slot is free on every rank, and set the words that engines will
    take to the others behind own rows."""
    rank = wl.rank(world)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    _set_own_words(own_words, num_own, e, rank, world)


@triton.jit
def take_pieces(own_words, num_own, slot, world):
    """The same of words that no kernel of this rank waits for."""
    rank = wl.rank(world)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    # weft: equivalent-mutant relax-release, narrow of notify: engines alone read these words,
    # behind this kernel in stream order
    _set_own_words(own_words, num_own, e, rank, world)
