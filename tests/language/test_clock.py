"""`wl.timestamp`: where it stands in emitted code, and what the emulator says the time is."""

from __future__ import annotations

import re

import language_kernels as kernels
import pytest
import torch
import triton
import triton.language as tl
from language_kernels import GPUS, text

import weft
import weft.language as wl

CLOCK = {"cuda": r"mov\.u64 \S+, %globaltimer", "hip": "s_memrealtime"}
BARRIER = {"cuda": r"bar(rier)?\.sync", "hip": "s_barrier"}


@pytest.mark.parametrize("target", GPUS)
def test_a_timestamp_stays_between_what_comes_before_and_after_it(target):
    """In Triton's IR, where its pipeliner has already moved what it moves."""
    backend = target.split(":")[0]
    code = text(kernels.time_a_wait, target, "ttgir")
    asked = "globaltimer" if backend == "cuda" else "s_memrealtime"
    start, waited, end = (found.start() for found in re.finditer(asked, code))
    poll = code.index("ld.acquire.sys" if backend == "cuda" else "atomic_rmw add, acquire, sys")
    loads = [found.start() for found in re.finditer(r"tt\.load|buffer_load", code)]
    stores = [found.start() for found in re.finditer(r"tt\.store|buffer_store", code)]
    assert start < poll < waited < min(loads) < min(stores) < end


@pytest.mark.parametrize("target", GPUS)
def test_all_threads_meet_before_the_clock_is_read_and_after(target):
    backend = target.split(":")[0]
    code = kernels.machine_text(kernels.time_a_wait, target)
    events = re.finditer(f"(?P<clock>{CLOCK[backend]})|(?P<barrier>{BARRIER[backend]})", code)
    order = "".join("c" if found["clock"] else "b" for found in events)
    assert order.count("c") == 3 and len(re.findall("bc(?=b)", order)) == 3, order


@triton.jit
def tell(world, times, flags, done):
    """Rank 0 multiplies, then tells the others, which have waited for it."""
    i = tl.arange(0, 64)
    start = wl.timestamp()
    if wl.rank(world) == 0:
        tile = tl.full((64, 64), 1.0, tl.float16)
        tl.store(done + i[:, None] * 64 + i[None, :], tl.dot(tile, tile))
        for peer in range(1, world.num_ranks):
            wl.notify(world, flags, to=peer)
    else:
        wl.wait(flags, 1, world=world)
    tl.store(times, start)
    tl.store(times + 1, wl.timestamp())


def timed_ranks(ranks, seed):
    def main():
        world = weft.init()
        flags, times = world.signals(1), torch.zeros(2, dtype=torch.int64)
        tell[(1,)](world.arg, times, flags, torch.zeros(64, 64))
        world.synchronize()
        return times.tolist()

    return ranks(main, 3, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_each_emulated_program_counts_its_looks(ranks, seed):
    assert timed_ranks(ranks, seed) == [[1, 2]] * 3


@triton.jit
def add_between(times, x, n):
    start = wl.timestamp()
    i = tl.arange(0, 1024)
    for turn in range(n):
        tl.store(x + i, tl.load(x + i) + turn)
    tl.store(times + 2 * tl.program_id(0), start)
    tl.store(times + 2 * tl.program_id(0) + 1, wl.timestamp())


@pytest.mark.gpu(n=1)
def test_on_a_gpu_time_goes_on_within_a_kernel_and_from_one_to_the_next():
    times = torch.zeros(2, 8, 2, dtype=torch.int64, device="cuda")
    x = torch.zeros(1024, device="cuda")
    for launch in times:
        add_between[(8,)](launch, x, 1000)
    first, second = times.tolist()
    # A thousand rounds through memory take longer than any step of the clock.
    assert all(end > start for start, end in first + second)
    assert min(start for start, _ in second) >= max(end for _, end in first)
