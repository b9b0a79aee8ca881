"""What stands around copy-engine pulls of all ranks' rows: kernels of one launch each."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots
from weft.tiles import move


@triton.jit
def stage(x, staged, slot, shards, world, block: tl.constexpr, vec: tl.constexpr):
    """Own rows -> own slot, from which the copy engines of others read them."""
    move.begin(world, slot)
    own = move.own_piece(x, shards, wl.rank(world), vec)
    move.send(world, staged + own.offset, x + own.offset, own.size, wl.rank(world), block)


@triton.jit
def keep(x, out, shards, world, block: tl.constexpr, vec: tl.constexpr):
    """Own rows -> out, beside the copy engines."""
    own = move.own_piece(x, shards, wl.rank(world), vec)
    move.copy(out + own.first, x + own.offset, own.size, block)


@triton.jit
def announce(rows_ready, slot, world):
    """One program, before the copies: announces own rows, and waits for every rank's."""
    e = slots.slot_epoch(slot)
    wl.notify_all(world, rows_ready + wl.rank(world), e, op=wl.SignalOp.SET)
    wl.wait(rows_ready, e, world.num_ranks, world=world)


@triton.jit
def finish(slot, world, in_place: tl.constexpr):
    """One program, behind the copies: this rank has read all rows; in place, every rank has."""
    e = slots.slot_epoch(slot)
    slots.slot_close(world, slot, e)
    if in_place:
        slots.slot_wait_free(world, slot, e + 1)
