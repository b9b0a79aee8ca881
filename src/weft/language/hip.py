"""The primitives for AMD GPUs: assembly, and Triton's atomics: add and exchange honour order and
scope (cas does not).

An atomic whose result is used is made by one thread and handed to all through a block barrier, so
the control flow of a wait is the same for all threads, and replicas of an element get one value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import clock, one_sided, ordered, packets, signals
from weft.language import triton_api as api
from weft.language import world_layout as layout
from weft.language.addressing import translate
from weft.language.portable.give_up import leave_report
from weft.language.portable.ordered import as_integers, before
from weft.language.portable.packets import is_late, pack, wait_for_all
from weft.language.portable.signals import missing
from weft.language.registry import implement

# As rare as on NVIDIA, and for the same reason: docs/decisions/004-look-rarely.md.
LOOK_MASK, PACKET_LOOK_MASK = tl.constexpr(65535), tl.constexpr(16383)
NS_PER_TICK = tl.constexpr(10)  # s_memrealtime counts at 100 MHz on CDNA 3 and 4


@implement(clock.clock_ns, "hip")
@triton.jit
def clock_ns():
    """Waves may read different times."""
    ticks = api.assembly("s_memrealtime $0\n s_waitcnt lgkmcnt(0)", "=s", dtype=tl.int64)
    return ticks * NS_PER_TICK


@triton.jit
def wait_word(word, at_least, world, order: tl.constexpr, scope: tl.constexpr, site):
    seen = tl.atomic_add(word, 0, sem=order, scope=scope)
    if world is None:
        while missing(seen, at_least):
            seen = tl.atomic_add(word, 0, sem=order, scope=scope)
    else:
        failed = tl.cast(0, tl.int32)
        deadline = tl.cast(0, tl.int64)
        while missing(seen, at_least):
            failed += 1
            if failed & LOOK_MASK == 0:
                now = clock_ns()
                if deadline == 0:
                    deadline = now + tl.load(world.table + layout.TIMEOUT_NS)
                abort = tl.load(world.table + layout.ABORT_PTR).to(tl.pointer_type(tl.int32))
                # The clock may split the waves: nothing in this branch has a block barrier.
                if now >= deadline:
                    leave_report(word, at_least, seen, world, abort, now < deadline, site)
                # All threads learn it from one: here they agree again.
                if tl.atomic_add(abort, 0, sem="relaxed", scope="sys") != 0:
                    seen = at_least
                else:
                    seen = tl.atomic_add(word, 0, sem=order, scope=scope)
            else:
                seen = tl.atomic_add(word, 0, sem=order, scope=scope)


@implement(signals.complete_stores, "hip")
@triton.jit
def complete_stores():
    # Triton's barrier waits for LDS only: a wave's stores to memory may still be on their way.
    api.assembly("s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0", "=v,~{memory}")


@implement(signals.notify, "hip")
@triton.jit
def notify(world, signal, value, to, op, order, scope):
    if order == "release":
        complete_stores()
        # A releasing atomic is made by one thread and orders that thread's stores alone.
        tl.debug_barrier()
    if op == "add":
        tl.atomic_add(translate(world, signal, to), value, sem=order, scope=scope)
    else:
        tl.atomic_xchg(translate(world, signal, to), value, sem=order, scope=scope)


@implement(signals.wait, "hip")
@triton.jit
def wait(signal, at_least, count, world, order, scope, site):
    for i in range(count):
        wait_word(signal + i, at_least, world, order, scope, site)
    tl.debug_barrier()


@implement(signals.order_async_proxy, "hip")
@triton.jit
def order_async_proxy():
    """AMD's loads are of one kind."""


# Ordered stores are exchanges: docs/decisions/007-three-tritons.md says why.
@implement(ordered.store, "hip")
@triton.jit
def store(ptr, value, order, scope):
    words = as_integers(ptr)
    before(order)
    tl.atomic_xchg(words, value.to(words.dtype.element_ty, bitcast=True), sem=order, scope=scope)


@implement(one_sided.fence, "hip")
@triton.jit
def fence(world):
    complete_stores()
    tl.debug_barrier()
    # What a release to the system is made of on CDNA 3 and 4, without a word to write.
    api.assembly("buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0", "=v,~{memory}")


@implement(packets.put_packets, "hip")
@triton.jit
def put_packets(world, dst, src, flag, to, mask):
    words = translate(world, dst, to)
    tl.atomic_xchg(words, pack(dst, src, flag, mask), mask=mask, sem="relaxed", scope="sys")


@triton.jit
def read(packets, mask):
    return tl.atomic_add(packets, 0, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def wait_tile(packets, flag, world, mask, site):
    seen = read(packets, mask)
    if world is None:
        while tl.max(is_late(seen, flag, mask).to(tl.int32)) != 0:
            seen = read(packets, mask)
    else:
        failed = tl.cast(0, tl.int32)
        deadline = tl.cast(0, tl.int64)
        going = tl.max(is_late(seen, flag, mask).to(tl.int32))
        while going != 0:
            failed += 1
            seen = read(packets, mask)
            late = is_late(seen, flag, mask)
            going = tl.max(late.to(tl.int32))
            if (failed & PACKET_LOOK_MASK) == 0:
                now = clock_ns()
                if deadline == 0:
                    deadline = now + tl.load(world.table + layout.TIMEOUT_NS)
                abort = tl.load(world.table + layout.ABORT_PTR).to(tl.pointer_type(tl.int32))
                word = tl.max(tl.where(late, packets.to(tl.int64), 0))
                flags = tl.max(tl.where(late, seen >> 32, -(1 << 31)))
                # The clock may split the waves: nothing in this branch has a block barrier.
                if now >= deadline:
                    leave_report(word, flag, flags, world, abort, now < deadline, site)
                # All threads learn it from one: here they agree again.
                if tl.atomic_add(abort, 0, sem="relaxed", scope="sys") != 0:
                    going = tl.cast(0, tl.int32)
    tl.debug_barrier()
    return seen


@implement(packets.wait_packets, "hip")
@triton.jit
def wait_packets(packets, flag, world, mask, dtype, site):
    return wait_for_all(wait_tile, packets, flag, world, mask, dtype, site)
