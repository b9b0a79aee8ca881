"""09. AG+GEMM: communication and computation each choose their own tiles.

A's rows lie over the ranks. They are pushed in tiles of 16 and multiplied in tiles of 32, each as
soon as the pushed tiles that it reads are here. Nothing need divide: of 100 rows some tiles end
short, and some of those that are multiplied lie across two ranks.

    weft emulate examples/09_ag_gemm.py --ranks 4
    torchrun --nproc-per-node 4 examples/09_ag_gemm.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

M, N, K = 100, 32, 64
PUSH, TILE = 16, 32


@triton.jit
def push_rows(world, gathered, tile_ready, a, num_rows, rank_rows, ROWS: tl.constexpr,
              COLS: tl.constexpr):  # fmt: skip
    """Tile j of this rank's rows, to every rank."""
    rank = wl.rank(world)
    j = tl.program_id(0)
    rows, cols = j * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = (rows < num_rows)[:, None]
    values = tl.load(a + rows[:, None] * COLS + cols[None, :], mask=inside, other=0.0)
    at = (rank * rank_rows + rows)[:, None] * COLS + cols[None, :]
    ready = tile_ready + rank * tl.num_programs(0) + j
    for step in range(wl.num_ranks(world)):
        peer = (rank + step) % wl.num_ranks(world)
        # weft: equivalent-mutant peer+1 of at: the own tile comes last then, for a later kernel
        wl.put(world, gathered + at, values, to=peer, mask=inside)
        # weft: equivalent-mutant value+1 of notify: each tile is pushed once
        wl.notify(world, ready, to=peer)


@triton.jit
def multiply(world, gathered, tile_ready, b, c, m, rank_rows, rank_tiles, PUSH: tl.constexpr,
             ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """One tile of A @ B, as soon as its rows are here."""
    first = tl.program_id(0) * ROWS
    last = min(first + ROWS, m) - 1
    # The pushed tiles that hold the first and the last row: those between them are in order.
    begin = first // rank_rows * rank_tiles + first % rank_rows // PUSH
    end = last // rank_rows * rank_tiles + last % rank_rows // PUSH
    wl.wait(tile_ready + begin, at_least=1, count=end - begin + 1)
    rows = first + tl.arange(0, ROWS)
    k, n = tl.arange(0, COLS), tl.arange(0, WIDTH)
    inside = (rows < m)[:, None]
    tile = tl.load(gathered + rows[:, None] * COLS + k[None, :], mask=inside, other=0.0)
    product = tl.dot(tile, tl.load(b + k[:, None] * WIDTH + n[None, :]), input_precision="ieee")
    tl.store(c + rows[:, None] * WIDTH + n[None, :], product, mask=inside)


def main():
    world = weft.init()
    torch.manual_seed(0)
    whole = torch.randint(-4, 5, (M, K), device=world.device).float()
    b = torch.randint(-4, 5, (K, N), device=world.device).float()
    c = torch.empty(M, N, device=world.device)
    rank_rows = triton.cdiv(M, world.num_ranks)
    rank_tiles = triton.cdiv(rank_rows, PUSH)
    a = whole[world.rank * rank_rows :][:rank_rows].contiguous()
    gathered = world.empty((M, K), torch.float32)
    tile_ready = world.signals(world.num_ranks * rank_tiles)

    push_rows[(rank_tiles,)](world.arg, gathered, tile_ready, a, len(a), rank_rows, PUSH, K)
    multiply[(triton.cdiv(M, TILE),)](
        world.arg, gathered, tile_ready, b, c, M, rank_rows, rank_tiles, PUSH, TILE, K, N
    )

    assert torch.equal(c, whole @ b), f"the product on rank {world.rank} is wrong"
    print(f"rank {world.rank} multiplied {M} rows of {world.num_ranks} ranks")
    world.close()


if __name__ == "__main__":
    main()
