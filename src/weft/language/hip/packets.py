"""AMD: packets, by 8-byte atomics: exchange to write, add of 0 to read.

An atomic whose result is used gives replicas of an element one value, so all threads of a program
loop together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import packets as declared
from weft.language import world_layout as layout
from weft.language.addressing import translate
from weft.language.hip.signals import clock_ns
from weft.language.portable.give_up import leave_report
from weft.language.portable.packets import is_late, pack, wait_for_all
from weft.language.registry import implement

ABORT_PTR = tl.constexpr(layout.ABORT_PTR)
TIMEOUT_NS = tl.constexpr(layout.TIMEOUT_NS)
LOOK_MASK = tl.constexpr(16383)


@implement(declared.put_packets, "hip")
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
            if (failed & LOOK_MASK) == 0:
                now = clock_ns()
                if deadline == 0:
                    deadline = now + tl.load(world.table + TIMEOUT_NS)
                abort = tl.load(world.table + ABORT_PTR).to(tl.pointer_type(tl.int32))
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


@implement(declared.wait_packets, "hip")
@triton.jit
def wait_packets(packets, flag, world, mask, dtype, site):
    return wait_for_all(wait_tile, packets, flag, world, mask, dtype, site)
