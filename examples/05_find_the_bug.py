"""05. Find the bug: each rank's tile goes once around the ring, and every rank adds up all of them.

On GPUs this gives the right sum nearly always. On the emulator it does not get away with it:

    weft emulate examples/05_find_the_bug.py --ranks 4

The report names two lines that nothing orders. What is missing between them? docs/tutorial.md
has the answer.
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

TILE = 128


@triton.jit
def ring_sum(world, values, inbox, tile_ready, out, tile: tl.constexpr):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    at = tl.arange(0, tile)
    travelling = tl.load(values + at)
    total = travelling
    for step in range(1, wl.num_ranks(world)):
        wl.put(world, inbox + at, travelling, to=right)
        wl.notify(world, tile_ready, to=right)
        wl.wait(tile_ready, at_least=step)
        travelling = tl.load(inbox + at)
        total += travelling
    tl.store(out + at, total)


def main():
    world = weft.init()
    values = torch.arange(TILE, device=world.device) + 100.0 * world.rank
    inbox = world.empty((TILE,), torch.float32)
    tile_ready = world.signals(1)
    out = torch.empty(TILE, device=world.device)

    ring_sum[(1,)](world.arg, values, inbox, tile_ready, out, TILE)

    n = world.num_ranks
    expected = n * torch.arange(TILE) + 100.0 * n * (n - 1) / 2
    assert torch.equal(out.cpu(), expected), f"the sum on rank {world.rank} is wrong"
    print(f"rank {world.rank} has the right sum")
    world.close()


if __name__ == "__main__":
    main()
