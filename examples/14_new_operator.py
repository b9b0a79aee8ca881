"""14. A new overlapped operator: out = all_gather over rows (A @ B), from a template and two hooks.

Each rank multiplies its own rows; a tile of the product goes to every rank as soon as it is there,
beneath the products of the tiles behind it. The GEMM template does the product; what is new is what
becomes of a tile (`emit`), who is told (`announce`), and where it ends up.

    weft emulate examples/14_new_operator.py --ranks 4
    torchrun --nproc-per-node 4 examples/14_new_operator.py
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.tiles import fragments, gemm, swizzle

ROWS, N, K, TILE, PROGRAMS, CALLS = 40, 48, 32, 16, 2, 3  # 40 rows a rank: a tile ends short


class Handed(NamedTuple):
    """Arguments of the hooks. Tuples come last: Triton asks for that."""

    gathered: Any
    tile_ready: Any
    e: Any
    rows: Any
    n: Any
    num_m: Any
    num_n: Any
    world: Any


@triton.jit
def elements(i, j, rank, args):
    """Where rows i and columns j of `rank` lie among all rows, and which of them there are."""
    inside = (i < args.rows)[:, None] & (j < args.n)[None, :]
    return (rank * args.rows + i)[:, None] * args.n + j[None, :], inside


@triton.jit
def signal_of(at, rank, args):
    """The signal of a tile of `rank`."""
    return args.tile_ready + (rank * args.num_m + at.i_m) * args.num_n + at.i_n


@triton.jit
def emit(at, cells, fragment, args):
    """A tile -> every rank, data alone."""
    rank = wl.rank(args.world)
    i, j = cells.row + fragments.index(fragment, 0), cells.column + fragments.index(fragment, 1)
    offset, inside = elements(i, j, rank, args)
    for step in range(wl.num_ranks(args.world)):
        to = (rank + step) % wl.num_ranks(args.world)
        # weft: equivalent-mutant peer+1 of at: every rank gets the same, in another order
        wl.put(args.world, args.gathered + offset, fragment, to=to, mask=inside)


@triton.jit
def announce(at, part, args):
    """Every rank learns of it; the template calls this when the tile's stores are on their way."""
    word = signal_of(at, wl.rank(args.world), args)
    wl.notify_all(args.world, word, args.e, op=wl.SignalOp.SET)


@triton.jit
def gemm_ag(a, b, out, gathered, tile_ready, slot, shape, tile, world):
    """Multiply own tiles, hand them out; then collect everybody's as they come."""
    e = wl.slot_epoch(slot)
    wl.slot_wait_free(world, slot, e)
    program, num = tl.program_id(0), tl.num_programs(0)
    m, n = shape.m, shape.n
    num_m, num_n = tl.cdiv(m, tile.m), tl.cdiv(n, tile.n)
    gemm.gemm(
        b, shape, tile, num_m, program, num, swizzle.grouped, (num_m,),
        gemm.ready_always, gemm.Always(a, m),
        emit, Handed(gathered, tile_ready, e, m, n, num_m, num_n, world),
        announce=announce,
        announce_args=Handed(gathered, tile_ready, e, m, n, num_m, num_n, world),
    )  # fmt: skip
    for i in range(program, num_m * num_n * wl.num_ranks(world), num):
        rank = i // (num_m * num_n)
        at = swizzle.grouped(i % (num_m * num_n), num_m, num_n, (num_m,))
        args = Handed(gathered, tile_ready, e, m, n, num_m, num_n, world)
        wl.wait(signal_of(at, rank, args), e, world=world)  # pairs with announce
        i, j = at.i_m * tile.m + tl.arange(0, tile.m), at.i_n * tile.n + tl.arange(0, tile.n)
        offset, inside = elements(i, j, rank, args)
        tl.store(out + offset, tl.load(gathered + offset, mask=inside), mask=inside)
    wl.slot_finish(world, slot, e, num)


def main():
    world = weft.init()
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(K, N, generator=generator).to(world.device)
    tiles = triton.cdiv(ROWS, TILE) * triton.cdiv(N, TILE)
    shape = gemm.Shape(ROWS, N, K, K, N, N)
    tile = gemm.Tile.of(TILE, TILE, TILE, size_k=K).as_constexpr()

    for _ in range(CALLS):  # one slot again and again, with other rows: credits keep calls apart
        whole = torch.randn(world.num_ranks * ROWS, K, generator=generator).to(world.device)
        a = whole[world.rank * ROWS :][:ROWS].contiguous()
        slot = world.workspace(
            "gemm_ag", {"gathered": ((world.num_ranks * ROWS, N), torch.float32)},
            {"tile_ready": (world.num_ranks * tiles, torch.int64)}, num_slots=1,
        )  # fmt: skip
        out = torch.empty(world.num_ranks * ROWS, N, device=world.device)
        arrays = (slot.gathered, slot.tile_ready, slot.arg)
        gemm_ag[(PROGRAMS,)](a, b, out, *arrays, shape, tile, world.arg)
        assert torch.allclose(out, whole @ b, rtol=1e-3, atol=1e-3), f"rank {world.rank} is wrong"
    print(f"rank {world.rank}: {tuple(out.shape)}, each tile handed out as soon as it was there")
    world.close()


if __name__ == "__main__":
    main()
