"""The device side of slots: which call this is, when buffers may be overwritten, when it is over.

Plain `@triton.jit` on top of the primitives, the same for every target. A slot's life is in
docs/memory_model.md; the host side is weft.runtime.slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language.addressing import rank
from weft.language.ordered import atomic_add
from weft.language.signals import notify_all, wait


@triton.jit
def slot_epoch(slot):
    """The number of this call on `slot`, as int64: what its event signals are SET to.

        e = epoch + 1

    Sync    the previous call on the slot is over: it came earlier in this rank's stream order
    """
    return tl.load(slot.epoch) + 1


@triton.jit
def slot_wait_free(world, slot, e):
    """Wait until every rank is done with the slot's previous call.

        for r in ranks:   wait  slot_free[r] >= e - 1

    Then this rank may overwrite the slot's buffers, its own as well as those on peers.

    Sync    pairs with slot_finish on every rank
    """
    wait(slot.slot_free, at_least=e - 1, count=world.num_ranks, world=world)


@triton.jit
def slot_finish(world, slot, e, num_programs):
    """Count this program as done with call `e`; the last one closes the call.

        ticket <- ticket + 1;   the num_programs-th:  ticket <- 0;  epoch <- e;
        slot_free[own rank]@p <- e   for every rank p

    Shapes  every program of the call's last kernel calls it once; num_programs of them
    Sync    releases what those programs wrote, and says that they are done reading
    """
    if slot_is_last(slot, num_programs):
        slot_close(world, slot, e)


@triton.jit
def slot_advance(slot, e, num_programs):
    """As slot_finish, without credits: for calls whose own messages say who has ended which.

    ticket <- ticket + 1;   the num_programs-th:  ticket <- 0;  epoch <- e
    """
    if slot_is_last(slot, num_programs):
        tl.store(slot.epoch, e)


@triton.jit
def slot_close(world, slot, e):
    """Close call `e`: slot_finish for a last kernel of one program.

        epoch <- e;   slot_free[own rank]@p <- e   for every rank p

    Sync    releases what this program wrote, and what its stream did before
    """
    tl.store(slot.epoch, e)
    # weft: equivalent-mutant swap of notify: the epoch is for this rank's own next call, which
    # comes later in stream order; no other rank reads it
    notify_all(world, slot.slot_free + rank(world), e, op="set")


@triton.jit
def slot_is_last(slot, num_programs):
    """Has every other program of the kernel been here? All they did comes before what follows."""
    done = atomic_add(slot.ticket, 1, order="acq_rel", scope="gpu") + 1
    if done == num_programs:
        # Nobody counts any more: the next call's programs come later in stream order.
        tl.store(slot.ticket, 0)
    return done == num_programs
