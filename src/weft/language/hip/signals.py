"""AMD: signals, with Triton's atomics: add and exchange honour order and scope (cas does not).

An atomic whose result is used is made by one thread and handed to all through a block barrier,
so the control flow of a wait is the same for all threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import signals as declared
from weft.language import triton_api as api
from weft.language import world_layout as layout
from weft.language.addressing import translate
from weft.language.hip.clock import clock_ns
from weft.language.portable.give_up import leave_report
from weft.language.portable.signals import missing
from weft.language.registry import implement

ABORT_PTR = tl.constexpr(layout.ABORT_PTR)
TIMEOUT_NS = tl.constexpr(layout.TIMEOUT_NS)
# As rare as on NVIDIA, and for the same reason: docs/decisions/004-look-rarely.md.
LOOK_MASK = tl.constexpr(65535)


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
                    deadline = now + tl.load(world.table + TIMEOUT_NS)
                abort = tl.load(world.table + ABORT_PTR).to(tl.pointer_type(tl.int32))
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


@implement(declared.complete_stores, "hip")
@triton.jit
def complete_stores():
    # Triton's barrier waits for LDS only: a wave's stores to memory may still be on their way.
    api.assembly("s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0", "=v,~{memory}")


@implement(declared.notify, "hip")
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


@implement(declared.notify_all, "hip")
@triton.jit
def notify_all(world, signal, value, op, order, scope):
    for peer in range(world.num_ranks):
        notify(world, signal, value, peer, op, order, scope)


@implement(declared.wait, "hip")
@triton.jit
def wait(signal, at_least, count, world, order, scope, site):
    for i in range(count):
        wait_word(signal + i, at_least, world, order, scope, site)
    tl.debug_barrier()
    return 0


@implement(declared.order_async_proxy, "hip")
@triton.jit
def order_async_proxy():
    """AMD's loads are of one kind."""
