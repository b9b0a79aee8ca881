"""06. All-gather: tiles are used as they come, from the own rank on.

One kernel pushes this rank's rows to everybody and works on everybody's rows: each tile has a
signal on each rank, and the order of the loop is the order in which tiles arrive.

    weft emulate examples/06_all_gather.py --ranks 4
    torchrun --nproc-per-node 4 examples/06_all_gather.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

TILES, TILE = 4, 128  # per rank


@triton.jit
def gather_and_square(world, rows, gathered, tile_ready, out, tiles, tile: tl.constexpr):
    rank = wl.rank(world)
    i = tl.program_id(0)
    mine = rank * tiles + i
    at = tl.arange(0, tile)
    values = tl.load(rows + i * tile + at)
    for step in range(wl.num_ranks(world)):
        # The next rank first, the own one last: no peer is written by all at once.
        peer = (rank + 1 + step) % wl.num_ranks(world)
        wl.put_signal(world, gathered + mine * tile + at, values, tile_ready + mine, to=peer)
    for step in range(wl.num_ranks(world)):
        source = (rank + wl.num_ranks(world) - step) % wl.num_ranks(world)
        theirs = source * tiles + i
        wl.wait(tile_ready + theirs, at_least=1)
        values = tl.load(gathered + theirs * tile + at)
        tl.store(out + theirs * tile + at, values * values)


def main():
    world = weft.init()
    n = world.num_ranks
    rows = torch.arange(TILES * TILE, device=world.device) + 1000.0 * world.rank
    gathered = world.empty((n, TILES * TILE), torch.float32)
    tile_ready = world.signals(n * TILES)
    out = torch.empty(n, TILES * TILE, device=world.device)

    gather_and_square[(TILES,)](world.arg, rows, gathered, tile_ready, out, TILES, TILE)

    expected = torch.arange(TILES * TILE) + 1000.0 * torch.arange(n)[:, None]
    assert torch.equal(out.cpu(), expected * expected), f"rank {world.rank} gathered wrong rows"
    assert (tile_ready == 1).all(), "each tile is announced once"
    print(f"rank {world.rank} squared the rows of {n} ranks")
    world.close()


if __name__ == "__main__":
    main()
