"""Own rows on their way into every rank's slot, for operators that gather one operand of a product.

Not an operator. Kernels that run before the product or beside it, and what its programs do of the
same: feed others' slots at first, wait for the engines and give the slot back at last. Signals and
who copies are told in ag_gemm.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles import fragments


@triton.jit
def feed(world, gathered, a, first, own_first, size, piece, pieces, to,
         block: tl.constexpr):  # fmt: skip
    """Store one of the pieces of `size` elements from `first` on, own rows, in rank `to`'s slot."""
    length = tl.cdiv(tl.cdiv(size, pieces), 16) * 16
    there = first + piece * length
    here = a + (there - own_first)
    # All pieces may have more than int32 counts; one has not.
    end = min(size - piece * length, length).to(tl.int32)
    for start in range(0, end, block):
        i = start + fragments.line_index(block)
        wl.put(world, gathered + there + i, here + i, to=to, mask=i < end)


@triton.jit
def push(a, gathered, rows_ready, fed, e, rank, shape, shards, tile_m, world, program,
         num_programs, block: tl.constexpr):  # fmt: skip
    """Store own rows in every slot, chunk by chunk; first for the rank behind, which needs them
    first, last in the own slot, where only tiles that straddle ranks read them."""
    own_first, own_end = mapping.part_of(shape.m, rank, shards.rows)
    pieces_of_rank = shards.chunks * shards.pieces
    for unit in range(program, world.num_ranks * pieces_of_rank, num_programs):
        to = (rank + world.num_ranks - 1 - unit // pieces_of_rank) % world.num_ranks
        chunk = unit % pieces_of_rank // shards.pieces
        first = min(own_first + chunk * shards.chunk_rows, own_end)
        size = (min(first + shards.chunk_rows, own_end) - first).to(tl.int64) * shape.k
        if to == rank:
            if world.num_ranks == 1 or shards.rows % tile_m == 0:
                size *= 0  # none, of the same type
        feed(world, gathered, a, first.to(tl.int64) * shape.k, own_first.to(tl.int64) * shape.k,
              size, unit % shards.pieces, shards.pieces, to, block)  # fmt: skip
        counter = fed + to * shards.chunks + chunk
        # weft: equivalent-mutant drop of complete_stores: no store of this kernel before it is
        # asynchronous; those of c come later
        done = wl.atomic_add(counter, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE) + 1
        if done == shards.pieces:
            tl.store(counter, 0)
            word = rows_ready + rank * shards.chunks + chunk
            # weft: equivalent-mutant swap, incomplete of notify: the counter is for this rank's
            # own next call, in stream order, and no store before it is asynchronous
            wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def stage(a, gathered, slot, shape, shards, world, block: tl.constexpr):
    """Copy own rows to the own slot, where peers fetch them and tiles that straddle ranks look."""
    rank = wl.rank(world).to(tl.int32)
    slots.slot_wait_free(world, slot, slots.slot_epoch(slot))
    own_first, own_end = mapping.part_of(shape.m, rank, shards.rows)
    first = own_first.to(tl.int64) * shape.k
    size = (own_end - own_first).to(tl.int64) * shape.k
    feed(world, gathered, a, first, first, size, tl.program_id(0), tl.num_programs(0), rank,
         block)  # fmt: skip


@triton.jit
def stage_edges(a, gathered, slot, shape, shards, world, tile_m: tl.constexpr,
                 block: tl.constexpr):  # fmt: skip
    """Copy to the own slot those own rows alone that share a tile with other ranks' rows."""
    rank = wl.rank(world).to(tl.int32)
    slots.slot_wait_free(world, slot, slots.slot_epoch(slot))
    own_first, own_end = mapping.part_of(shape.m, rank, shards.rows)
    head = min(tl.cdiv(own_first, tile_m) * tile_m, own_end)
    tail = max(own_end // tile_m * tile_m, head)
    own = own_first.to(tl.int64) * shape.k
    piece, pieces = tl.program_id(0), tl.num_programs(0)
    above, below = (head - own_first).to(tl.int64), (own_end - tail).to(tl.int64)
    feed(world, gathered, a, own, own, above * shape.k, piece, pieces, rank,
         block)  # fmt: skip
    feed(world, gathered, a, tail.to(tl.int64) * shape.k, own, below * shape.k, piece,
         pieces, rank, block)  # fmt: skip


@triton.jit
def open_slots(rows_ready, shard_ready, slot, chunks, world, is_staged: tl.constexpr):
    """One program, before the engines put: every rank's slot is free; here is what they copy as
    the word that says so. What was staged has waited already."""
    e = slots.slot_epoch(slot)
    if not is_staged:
        slots.slot_wait_free(world, slot, e)
    announce_here(rows_ready, shard_ready, e, chunks, world)


@triton.jit
def announce(rows_ready, shard_ready, slot, chunks, world):
    """One program: say that own rows may be fetched, and wait until every rank has.

    The copies come next on its stream; what staged the rows came before.
    """
    e = slots.slot_epoch(slot)
    # weft: equivalent-mutant relax of wait: after stage it says what is known; where rows are in
    # place it guards words alone, which no engine can read before they are written
    slots.slot_wait_free(world, slot, e)
    # First the word here: peers copy it as soon as they know, and notify_all releases it to them.
    announce_here(rows_ready, shard_ready, e, chunks, world)
    wl.notify_all(world, shard_ready + wl.rank(world), e, op=wl.SignalOp.SET)
    wl.wait(shard_ready, e, world.num_ranks, world=world)


@triton.jit
def announce_here(rows_ready, shard_ready, e, chunks, world):
    rank = wl.rank(world)
    for chunk in range(chunks):
        # Own rows are there in stream order; but where nothing is copied, this alone says that the
        # slot's epoch has been read.
        wl.notify(world, rows_ready + rank * chunks + chunk, e, to=rank, op=wl.SignalOp.SET,
                  scope=wl.Scope.DEVICE)  # fmt: skip
    # weft: equivalent-mutant narrow of notify: it orders nothing itself
    wl.notify(world, shard_ready + rank, e, to=rank, op=wl.SignalOp.SET, order=wl.Order.RELAXED)


@triton.jit
def close(shard_ready, rows_taken, world):
    """One program, behind the copies of rows that were read in place: theirs may change again.

    The call's epoch is that of its own announcement: the slot's has moved if _multiply is over.
    """
    rank = wl.rank(world)
    e = wl.load(shard_ready + rank)
    wl.notify_all(world, rows_taken + rank, e, op=wl.SignalOp.SET)
    wl.wait(rows_taken, e, world.num_ranks, world=world)


@triton.jit
def variable(number):
    """A number that Triton may take for a constant, 1 say, as one that it does not."""
    return tl.cast(number, tl.int32)


class GivingBack(NamedTuple):
    """What ends a program's part of a call: the words of rows, for which one program waits; in this
    order for the reason told at `Arrival` of ag_gemm.py."""

    rows_ready: Any
    e: Any
    words: Any
    program: Any
    num_programs: Any
    slot: Any
    world: Any


@triton.jit
def give_back(args):
    """This program has read all that it will. args: GivingBack"""
    # weft: equivalent-mutant drop of complete_stores: only stores of c are asynchronous, which are
    # complete when the kernel has ended, and which no other rank reads
    # weft: equivalent-mutant incomplete of notify: only stores of c are asynchronous, as above
    slots.slot_finish(args.world, args.slot, args.e, args.num_programs)


@triton.jit
def await_copies_and_give_back(args):
    """One program first: no engine writes a word of this call any more. args: GivingBack"""
    if args.program == args.num_programs - 1:
        # Also chunks without rows: copied after the slot was given back, a word would be one of the
        # next call, and of another chunk if that has more of them. And what began the copies has
        # read the epoch, which ends with this call.
        wl.wait(args.rows_ready, args.e, args.words, world=args.world)
    give_back(args)
