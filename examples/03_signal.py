"""03. Signal and wait: tiles travel down a chain of ranks inside one kernel.

A tile is handed on as soon as it is there, while later tiles are still on their way: that is
overlap. No barrier is needed, since each tile has a signal of its own.

    weft emulate examples/03_signal.py --ranks 4
    torchrun --nproc-per-node 4 examples/03_signal.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

TILES, TILE = 6, 64


@triton.jit
def relay(world, row, tile_ready, out, tile: tl.constexpr):
    rank = wl.rank(world)
    i = tl.program_id(0)
    at = i * tile + tl.arange(0, tile)
    if rank > 0:
        # Pairs with the notify below, on the rank to our left.
        wl.wait(tile_ready + i, at_least=1)
    values = tl.load(row + at) + 1
    tl.store(out + at, values)
    if rank + 1 < wl.num_ranks(world):
        wl.put(world, row + at, values, to=rank + 1)
        # A notify releases: who sees the signal sees everything that was put before it.
        wl.notify(world, tile_ready + i, to=rank + 1)


def main():
    world = weft.init()
    row = world.empty((TILES * TILE,), torch.float32)
    tile_ready = world.signals(TILES)  # zeroed words, one for each tile
    out = torch.empty(TILES * TILE, device=world.device)
    if world.rank == 0:
        row.copy_(torch.arange(TILES * TILE))

    relay[(TILES,)](world.arg, row, tile_ready, out, TILE)

    expected = torch.arange(TILES * TILE) + world.rank + 1.0
    assert torch.equal(out.cpu(), expected), f"rank {world.rank} was handed the wrong tiles"
    assert (tile_ready == int(world.rank > 0)).all(), "each tile is announced once"
    print(f"rank {world.rank} added one to {TILES} tiles")
    world.close()


if __name__ == "__main__":
    main()
