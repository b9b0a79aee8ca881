"""01. Load from a peer: every rank reads its right neighbour's row, straight from its memory.

weft emulate examples/01_load.py --ranks 4          no GPU needed
torchrun --nproc-per-node 4 examples/01_load.py     on GPUs
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

SIZE, TILE = 1000, 256


@triton.jit
def read_neighbour(world, row, out, size, tile: tl.constexpr):
    neighbour = (wl.rank(world) + 1) % wl.num_ranks(world)
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    # The same object lies at another address on every rank; `at` translates ours to theirs.
    values = tl.load(wl.at(world, row + at, neighbour), mask=at < size)
    tl.store(out + at, values, mask=at < size)


def main():
    world = weft.init()
    row = world.empty((SIZE,), torch.float32)  # symmetric: one on every rank
    out = torch.empty(SIZE, device=world.device)  # private
    row.copy_(torch.arange(SIZE) + 1000 * world.rank)

    world.barrier()  # every rank has filled its row before anybody reads it
    read_neighbour[(triton.cdiv(SIZE, TILE),)](world.arg, row, out, SIZE, TILE)

    neighbour = (world.rank + 1) % world.num_ranks
    expected = torch.arange(SIZE) + 1000.0 * neighbour
    assert torch.equal(out.cpu(), expected), f"rank {world.rank} read the wrong row"
    print(f"rank {world.rank} read the row of rank {neighbour}")
    world.close()


if __name__ == "__main__":
    main()
