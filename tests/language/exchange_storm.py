"""Many rounds of narrow packets between all ranks, every value checked.

    torchrun --nproc-per-node 2 tests/language/exchange_storm.py [ROUNDS]

A value that is not the one sent, or that a signal has overtaken, is counted. Runs on emulated
ranks too. Prints the counts and, on GPUs, the time of a round.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

PROGRAMS, SIZE = 8, 1024


@triton.jit
def half_packets(world, inbox, signal, wrong, first, rounds, SIZE: tl.constexpr):
    """inbox: int64[2, programs, num_ranks, SIZE / 2]. Two fp16 values share a packet."""
    n = world.num_ranks
    at = tl.arange(0, SIZE)
    words = tl.arange(0, SIZE // 2)
    bad = tl.zeros((SIZE,), tl.int32)
    for e in range(first, first + rounds):
        half = (e % 2) * tl.num_programs(0) + tl.program_id(0)
        slot = inbox + half.to(tl.int64) * n * (SIZE // 2)
        for peer in range(n):
            value = ((e + wl.rank(world) + at) % 2048).to(tl.float16)
            wl.put_packets(world, slot + wl.rank(world) * (SIZE // 2) + words, value, e, to=peer)
        for source in range(n):
            packets = slot + source * (SIZE // 2) + words
            value = wl.wait_packets(packets, e, dtype=tl.float16)
            bad += (value != ((e + source + at) % 2048).to(tl.float16)).to(tl.int32)
    tl.store(wrong + tl.program_id(0), tl.sum(bad))


KERNELS = (half_packets,)


def main(rounds: int = 20_000) -> dict[str, dict[str, float]]:
    """For each kernel: wrong values, and microseconds per round on GPUs."""
    world = weft.init()
    found: dict[str, dict[str, float]] = {}
    for kernel in KERNELS:
        words = 2 * PROGRAMS * world.num_ranks * SIZE
        inbox = world.zeros((words,), torch.int64, name="inbox")
        signal = world.signals(2 * PROGRAMS)
        wrong = torch.zeros(PROGRAMS, dtype=torch.int32, device=world.device)
        us = []
        for first, count in ((1, 2), (3, rounds)):  # first to load, then to run
            events = None
            if torch.device(world.device).type != "cpu":
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            world.barrier()
            if events:
                events[0].record()
            kernel[(PROGRAMS,)](
                world.arg, inbox, signal, wrong, first, count, SIZE=SIZE, num_warps=4
            )
            if events:
                events[1].record()
            world.synchronize()
            if events:
                us.append(events[0].elapsed_time(events[1]) * 1e3 / count)
        found[kernel.__name__] = {"wrong": int(wrong.sum())}
        if us:
            found[kernel.__name__]["round_us"] = us[-1]
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    world.close()
    return found


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:]))
    sys.exit(any(row["wrong"] for row in found.values()))
