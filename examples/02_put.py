"""02. Put: every rank writes its row into every other rank's memory, an all-gather by pushing.

weft emulate examples/02_put.py --ranks 4
torchrun --nproc-per-node 4 examples/02_put.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

SIZE, TILE = 600, 128


@triton.jit
def push_row(world, row, gathered, size, tile: tl.constexpr):
    rank = wl.rank(world)
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = at < size
    values = tl.load(row + at, mask=inside)
    for step in range(wl.num_ranks(world)):
        # Each rank starts with itself, then its right neighbour: no peer is written by all at once.
        peer = (rank + step) % wl.num_ranks(world)
        # weft: equivalent-mutant peer+1 of at: every peer is reached, in another order
        wl.put(world, gathered + rank * size + at, values, to=peer, mask=inside)


def main():
    world = weft.init()
    torch.manual_seed(world.rank)
    row = torch.randn(SIZE, device=world.device)
    gathered = world.empty((world.num_ranks, SIZE), torch.float32)

    push_row[(triton.cdiv(SIZE, TILE),)](world.arg, row, gathered, SIZE, TILE)
    world.barrier()  # every rank's pushes have arrived

    for peer in range(world.num_ranks):
        torch.manual_seed(peer)
        expected = torch.randn(SIZE, device=world.device)
        assert torch.equal(gathered[peer], expected), f"row {peer} on rank {world.rank} is wrong"
    print(f"rank {world.rank} holds all {world.num_ranks} rows")
    world.close()


if __name__ == "__main__":
    main()
