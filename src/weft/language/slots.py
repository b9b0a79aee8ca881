"""The device side of slots: which call this is, when buffers may be overwritten, when it is over.

Plain `@triton.jit` on top of the primitives, the same for every target. A slot's life is in
docs/memory_model.md; the host side is weft.runtime.slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language.addressing import rank
from weft.language.ordered import atomic_add, store
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
    done = atomic_add(slot.ticket, 1, order="acq_rel", scope="gpu") + 1
    if done == num_programs:
        store(slot.ticket, 0, scope="gpu")
        tl.store(slot.epoch, e)
        notify_all(world, slot.slot_free + rank(world), e, op="set")
