"""04. Barrier: an all-reduce in one kernel, called again and again on the same memory.

Each program has a barrier channel of its own, so tiles do not wait for each other.

    weft emulate examples/04_barrier.py --ranks 4
    torchrun --nproc-per-node 4 examples/04_barrier.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

TILES, TILE, ROUNDS = 3, 128, 3


@triton.jit
def all_reduce(world, values, part, out, tile: tl.constexpr):
    i = tl.program_id(0)
    at = i * tile + tl.arange(0, tile)
    tl.store(part + at, tl.load(values + at))
    wl.barrier(world, i)  # every rank's part is written
    total = tl.zeros((tile,), tl.float32)
    for peer in range(wl.num_ranks(world)):
        # The same order on every rank: the sums are equal to the last bit everywhere.
        # weft: equivalent-mutant peer+1 of at: another order, but again the same everywhere
        total += tl.load(wl.at(world, part + at, peer))
    tl.store(out + at, total)
    # weft: equivalent-mutant swap of notify: what is stored before it is for this rank alone
    wl.barrier(world, i)  # every rank has read: the parts may be written again


def main():
    world = weft.init()
    part = world.empty((TILES * TILE,), torch.float32)
    out = torch.empty(TILES * TILE, device=world.device)
    for turn in range(ROUNDS):
        values = torch.arange(TILES * TILE, device=world.device) * (turn + 1.0) + world.rank
        all_reduce[(TILES,)](world.arg, values, part, out, TILE)
        n = world.num_ranks
        expected = n * torch.arange(TILES * TILE) * (turn + 1.0) + n * (n - 1) / 2
        assert torch.equal(out.cpu(), expected), f"round {turn} on rank {world.rank} is wrong"
    print(f"rank {world.rank} summed {ROUNDS} rounds")
    world.close()


if __name__ == "__main__":
    main()
