"""NVIDIA: signals. Single-poll assembly inside Triton's own control flow; no labels, no bar.sync.

Triton's pipeliner moves loads above an asm that stands alone, so every wait ends with a block
barrier, which it knows; tests/language/test_emitted_code.py reads what comes out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import clock
from weft.language import signals as declared
from weft.language import triton_api as api
from weft.language import world_layout as layout
from weft.language.addressing import is_near, translate
from weft.language.cuda import nvshmem
from weft.language.cuda.nvshmem import has_far_peers
from weft.language.portable.give_up import leave_report
from weft.language.portable.signals import missing
from weft.language.registry import implement
from weft.language.triton_api import ordered_store

# A clock and an abort word are looked at once in so many failed polls: some 40 ms. The abort word
# is in host memory: at one look in 256 polls the reads of a full grid held up the copy engines
# that it waited for: 742 to 1487 us instead of 190 (docs/decisions/004-look-rarely.md).
LOOK_MASK = tl.constexpr(65535)


@api.builtin
def has_bulk_stores(_semantic=None):
    """Are there asynchronous (TMA) stores, and with them the async proxy? A constant."""
    return api.constexpr(api.cuda_arch(_semantic) >= 90)


@api.builtin
def sharers(count, _semantic=None):
    """How many threads share the work on `count` words, each with its own. A constant."""
    # A constant is usually 1; in Gluon a part of the program may run what is traced.
    if not api.is_tensor(count) or api.is_gluon(_semantic):
        return api.constexpr(1)
    return api.constexpr(32 * api.num_warps(_semantic))


@implement(clock.clock_ns, "cuda")
@triton.jit
def clock_ns():
    """The clock that all SMs of a GPU share."""
    return api.assembly("mov.u64 $0, %globaltimer;", "=l,~{memory}", dtype=tl.int64)


@triton.jit
def poll(word, order: tl.constexpr, scope: tl.constexpr):
    """One load by every thread; threads may see different values."""
    if word.dtype.element_ty.primitive_bitwidth == 32:
        return api.assembly(f"ld.{order}.{scope}.global.b32 $0, [$1];", "=r,l,~{memory}", word)
    else:
        return api.assembly(
            f"ld.{order}.{scope}.global.b64 $0, [$1];", "=l,l,~{memory}", word, dtype=tl.int64
        )


@implement(declared.order_async_proxy, "cuda")
@triton.jit
def order_async_proxy():
    if has_bulk_stores():
        api.assembly("fence.proxy.async.global; mov.u32 $0, 0;", "=r,~{memory}")


@triton.jit
def wait_word(word, at_least, world, order: tl.constexpr, scope: tl.constexpr, site):
    seen = poll(word, order, scope)
    if world is None:
        while missing(seen, at_least):
            seen = poll(word, order, scope)
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
                aborted = poll(abort, "relaxed", "sys") != 0
                # Threads may differ here: nothing in this branch contains a block barrier.
                if aborted | (now >= deadline):
                    leave_report(word, at_least, seen, world, abort, aborted, site)
                    seen = at_least
                else:
                    seen = poll(word, order, scope)
            else:
                seen = poll(word, order, scope)


@triton.jit
def thread_of(num_threads: tl.constexpr):
    """Which of the threads this one is: a scalar that differs from thread to thread."""
    if num_threads == 1:
        return 0
    return api.assembly("mov.u32 $0, %tid.x;", "=r", is_pure=True)


@implement(declared.complete_stores, "cuda")
@triton.jit
def complete_stores():
    if has_bulk_stores():
        api.assembly(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;", "=r,~{memory}"
        )


@triton.jit
def complete_writes(world):
    """Before a release: all threads' writes are on their way, far puts in memory."""
    complete_stores()
    if has_far_peers(world):
        nvshmem.complete_far()
    # A releasing atomic is made by one thread and orders that thread's stores alone.
    tl.debug_barrier()


@triton.jit
def change(world, signal, value, to, op: tl.constexpr, order: tl.constexpr, scope: tl.constexpr):
    """signal@to <- value, or + value, by one thread."""
    if has_far_peers(world):
        if op == "add":
            # To near ranks too: a network card's additions and a GPU's are not atomic together.
            nvshmem.signal(world, signal, value, to, op, order)
        else:
            if is_near(world, to):
                ordered_store(translate(world, signal, to), value, order, scope)
            else:
                nvshmem.signal(world, signal, value, to, op, order)
    elif op == "add":
        tl.atomic_add(translate(world, signal, to), value, sem=order, scope=scope)
    else:
        ordered_store(translate(world, signal, to), value, order, scope)


@implement(declared.notify, "cuda")
@triton.jit
def notify(world, signal, value, to, op, order, scope):
    if order == "release":
        complete_writes(world)
    change(world, signal, value, to, op, order, scope)


@implement(declared.notify_all, "cuda")
@triton.jit
def notify_all(world, signal, value, op, order, scope):
    # A fence and relaxed atomics make releases too; a release each would make every atomic wait
    # until the one before has come back from its rank.
    if order == "release":
        complete_writes(world)
        api.assembly(f"fence.acq_rel.{scope}; mov.u32 $0, 0;", "=r,~{memory}")
    for peer in range(world.num_ranks):
        change(world, signal, value, peer, op, "relaxed", scope)


@implement(declared.wait, "cuda")
@triton.jit
def wait(signal, at_least, count, world, order, scope, site):
    # Of many words each thread waits for its own; the barrier below makes one thread's knowledge
    # all threads'. One after the other they take 170 ns each, though they are all there.
    for i in range(thread_of(sharers(count)), count, sharers(count)):
        wait_word(signal + i, at_least, world, order, scope, site)
    if world is not None:
        if order == "acquire" and has_far_peers(world):
            nvshmem.see_what_came(signal)
    # Also tells Triton's pipeliner: no load of what the signal guards moves above this.
    tl.debug_barrier()
    if order == "acquire":
        order_async_proxy()
