"""09. A channel: AG+GEMM in which communication and computation each choose their own tiles.

A's rows are pushed in tiles of 16 and multiplied in tiles of 32, of 100 rows on any number of
ranks: tiles end short, and some lie across two ranks. The channel's mapping knows who waits for
whom.

    weft emulate examples/09_channel.py --ranks 4
    torchrun --nproc-per-node 4 examples/09_channel.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

M, N, K = 100, 32, 64
PUSH, TILE = 16, 32


@triton.jit
def push_rows(world, made, a, per_rank, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This rank's rows, tile by tile, to every rank."""
    rank = wl.rank(world)
    j = tl.program_id(0)
    i = rank * per_rank + j
    first, end = wl.f_shape(i, made.mapping)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = (rows < end - first)[:, None]
    values = tl.load(a + (j * ROWS + rows)[:, None] * COLS + cols[None, :], mask=inside, other=0.0)
    for step in range(wl.num_ranks(world)):
        peer = (rank + step) % wl.num_ranks(world)
        # weft: equivalent-mutant peer+1 of at: the own tile comes last then, for a later kernel
        wl.tile_push(world, made, i, 0, values, peer)
        wl.tile_notify(world, made, i, peer)


@triton.jit
def multiply(world, used, b, c, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """One tile of A @ B, as soon as its rows are here."""
    i = tl.program_id(0)
    wl.tile_wait(world, used, i)
    pointers, inside = wl.tile_pointers(used, i, 0, ROWS, COLS)
    rows = tl.load(pointers, mask=inside, other=0.0)
    k, n = tl.arange(0, COLS), tl.arange(0, WIDTH)
    product = tl.dot(rows, tl.load(b + k[:, None] * WIDTH + n[None, :]), input_precision="ieee")
    first, end = wl.f_shape(i, used.mapping)
    at = first + tl.arange(0, ROWS)
    tl.store(c + at[:, None] * WIDTH + n[None, :], product, mask=(at < end)[:, None])


def main():
    world = weft.init()
    torch.manual_seed(0)
    whole = torch.randint(-4, 5, (M, K), device=world.device).float()
    b = torch.randint(-4, 5, (K, N), device=world.device).float()
    c = torch.empty(M, N, device=world.device)
    channel = world.channel("rows", (M, K), torch.float32, chunks=2, push_rows=PUSH)
    a = whole[channel.rows_of(world.rank)].contiguous()
    made, used = channel.produced(), channel.consumed(TILE)

    push_rows[(channel.tiles_per_rank,)](world.arg, made, a, channel.tiles_per_rank, PUSH, K)
    multiply[(triton.cdiv(M, TILE),)](world.arg, used, b, c, TILE, K, N)

    assert torch.equal(c, whole @ b), f"the product on rank {world.rank} is wrong"
    print(f"rank {world.rank} multiplied {M} rows of {world.num_ranks} ranks")
    world.close()


if __name__ == "__main__":
    main()
