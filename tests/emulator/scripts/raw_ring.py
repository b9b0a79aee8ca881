"""A ring all-gather as somebody who has never heard of wl would write it.

Raw pointer tables, raw Triton atomics, no primitives of weft's: only its symmetric memory. The
argument plants a fault: `race` forgets to wait, `deadlock` lets everybody wait before signalling,
`scope` signals at gpu scope, `volatile` spins on a volatile load (which is right, if relaxed).
"""

import argparse

import torch
import triton
import triton.language as tl

import weft


@triton.jit
def ring_step(shards, flags, rank, step, n: tl.constexpr, ranks: tl.constexpr, fault: tl.constexpr):
    right = (rank + 1) % ranks
    travelling = (rank - step + ranks) % ranks
    i = tl.arange(0, n)
    mine = tl.load(shards + rank).to(tl.pointer_type(tl.float32))
    theirs = tl.load(shards + right).to(tl.pointer_type(tl.float32))
    my_flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    their_flag = tl.load(flags + right).to(tl.pointer_type(tl.int32))
    if fault == "deadlock":
        while tl.atomic_add(my_flag, 0, sem="acquire", scope="sys") < step + 1:  # DEADLOCK
            pass
    if step > 0:
        if fault != "race":
            while tl.atomic_add(my_flag, 0, sem="acquire", scope="sys") < step:
                pass
            tl.debug_barrier()
    block = tl.load(mine + travelling * n + i)  # RACE
    tl.store(theirs + travelling * n + i, block)
    tl.debug_barrier()
    if fault == "scope":
        tl.atomic_add(their_flag, 1, sem="release", scope="gpu")
    else:
        tl.atomic_add(their_flag, 1, sem="release", scope="sys")


@triton.jit
def wait_for(flags, rank, expected):
    my_flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(my_flag, 0, sem="acquire", scope="sys") < expected:
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    parser.add_argument("-n", type=int, default=64)
    options = parser.parse_args()
    world = weft.init()
    ranks, n = world.num_ranks, options.n
    gathered = world.empty((ranks, n), torch.float32)
    flag = world.signals(1)
    gathered[world.rank] = torch.arange(n) + 1000.0 * world.rank
    world.barrier()
    shards, flags = world.pointers(gathered), world.pointers(flag)
    for step in range(ranks - 1):
        ring_step[(1,)](shards, flags, world.rank, step, n, ranks, options.fault)
    wait_for[(1,)](flags, world.rank, ranks - 1)
    expected = torch.stack([torch.arange(n) + 1000.0 * rank for rank in range(ranks)])
    assert torch.equal(gathered.cpu(), expected), f"rank {world.rank} gathered the wrong rows"
    print(f"rank {world.rank} gathered {ranks} shards")
    world.close()


if __name__ == "__main__":
    main()
