"""What is the same on all GPUs of signals; and on every target barriers, and the time between two
of the block's."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import barriers, clock
from weft.language import signals as declared
from weft.language import world_layout as layout
from weft.language.clock import clock_ns
from weft.language.ordered import atomic_add
from weft.language.registry import implement
from weft.language.signals import notify, order_async_proxy, wait

TOP_BIT = tl.constexpr(-(1 << 31))


@triton.jit
def missing(seen, at_least):
    """Is the word still behind? Modular; wraps on purpose, also in debug builds."""
    return tl.sub(seen, at_least, sanitize_overflow=False) < 0


@implement(declared.notify_all, "hip", "emu")
@triton.jit
def notify_all(world, signal, value, op, order, scope):
    for peer in range(world.num_ranks):
        # weft: equivalent-mutant peer+1 of signal_at: all ranks get the signal, in another order
        notify(world, signal, value, to=peer, op=op, order=order, scope=scope)


@implement(declared.test, "cuda", "hip")
@triton.jit
def test(signal, at_least, count, order, scope):
    # An atomic that adds 0 becomes one thread's load, broadcast: one answer for all threads.
    reached = tl.cast(1, tl.int1)
    for i in range(count):
        reached &= ~missing(tl.atomic_add(signal + i, 0, sem=order, scope=scope), at_least)
    tl.debug_barrier()
    if order == "acquire":
        order_async_proxy()
    return reached


@implement(barriers.barrier, "cuda", "hip", "emu")
@triton.jit
def barrier(world, channel):
    words = tl.pointer_type(tl.int32)
    arrivals = tl.load(world.table + layout.BARRIER_ARRIVALS).to(words) + channel
    generations = tl.load(world.table + layout.BARRIER_GENERATIONS).to(words) + channel
    generation = tl.add(tl.load(generations), 1, sanitize_overflow=False)
    declared.notify_all(world, arrivals)
    # Between the block barriers of notify_all and wait: a next call, by any thread, reads it right.
    tl.store(generations, generation)
    expected = tl.mul(generation, world.num_ranks, sanitize_overflow=False)
    wait(arrivals, at_least=expected, world=world)


@implement(barriers.barrier_grid, "cuda", "hip", "emu")
@triton.jit
def barrier_grid(counter, world):
    # One round adds exactly 2**31, whatever the grid: the word is 0 or the top bit between
    # rounds, so the value that completes this round is the opposite of the top bit seen.
    num_programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = tl.program_id(0) + tl.program_id(1) + tl.program_id(2)
    step = tl.where(program == 0, (1 - num_programs) ^ TOP_BIT, 1)
    before = atomic_add(counter, step, order="acq_rel", scope="gpu")
    wait(counter, at_least=(before & TOP_BIT) ^ TOP_BIT, world=world, scope="gpu")


@implement(clock.timestamp, "cuda", "hip", "emu")
@triton.jit
def timestamp():
    tl.debug_barrier()
    now = clock_ns()
    # Triton's pipeliner moves loads above an asm that stands alone, but not above a barrier.
    tl.debug_barrier()
    return now
