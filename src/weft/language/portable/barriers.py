"""Barriers, in terms of notify, wait and ordered access."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import barriers as declared
from weft.language import world_layout as layout
from weft.language.ordered import atomic_add
from weft.language.registry import implement
from weft.language.signals import notify_all, wait

BARRIER_ARRIVALS = tl.constexpr(layout.BARRIER_ARRIVALS)
BARRIER_GENERATIONS = tl.constexpr(layout.BARRIER_GENERATIONS)
TOP_BIT = tl.constexpr(-(1 << 31))


@implement(declared.barrier, "cuda", "hip", "emu")
@triton.jit
def barrier(world, channel):
    words = tl.pointer_type(tl.int32)
    arrivals = tl.load(world.table + BARRIER_ARRIVALS).to(words) + channel
    generations = tl.load(world.table + BARRIER_GENERATIONS).to(words) + channel
    generation = tl.add(tl.load(generations), 1, sanitize_overflow=False)
    notify_all(world, arrivals)
    # Between the block barriers of notify_all and wait: a next call, by any thread, reads it right.
    tl.store(generations, generation)
    expected = tl.mul(generation, world.num_ranks, sanitize_overflow=False)
    wait(arrivals, at_least=expected, world=world)


@implement(declared.barrier_grid, "cuda", "hip", "emu")
@triton.jit
def barrier_grid(counter, world):
    # One round adds exactly 2**31, whatever the grid: the word is 0 or the top bit between
    # rounds, so the value that completes this round is the opposite of the top bit seen.
    num_programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = tl.program_id(0) + tl.program_id(1) + tl.program_id(2)
    step = tl.where(program == 0, (1 - num_programs) ^ TOP_BIT, 1)
    before = atomic_add(counter, step, order="acq_rel", scope="gpu")
    wait(counter, at_least=(before & TOP_BIT) ^ TOP_BIT, world=world, scope="gpu")
