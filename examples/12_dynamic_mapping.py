"""12. A mapping made at run time: how many rows go where is known to the device alone.

Every rank sends its rows to the ranks that they name, as tokens go to experts. The ranks tell each
other how many; a kernel makes tables of that; the channel does the rest as it did in 09.

    weft emulate examples/12_dynamic_mapping.py --ranks 4
    torchrun --nproc-per-node 4 examples/12_dynamic_mapping.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

ROWS, COLS = 16, 32  # of each rank, at most so many for one peer


@triton.jit
def plan(world, targets, counts, counts_ready, out_tables, in_tables, ROWS: tl.constexpr):
    """Count, tell everybody, make the tables: first, end, rank, channel by tile; count."""
    rank = wl.rank(world)
    n = wl.num_ranks(world)
    mine = tl.load(targets + tl.arange(0, ROWS))
    for step in range(n):
        peer = (rank + step) % n
        for p in range(n):
            num = tl.sum((mine == p).to(tl.int32), axis=0)
            # weft: equivalent-mutant peer+1 of at: the own counts come last then, for this program
            wl.put(world, counts + rank * n + p, num, to=peer)
        # weft: equivalent-mutant value+1 of notify: they are told once
        wl.notify(world, counts_ready + rank, to=peer)
    wl.wait(counts_ready, at_least=1, count=n)
    here = 0
    for p in range(n):  # tile p: what this rank sends to p, and what p sends here
        there = 0
        for source in range(rank):
            there += tl.load(counts + source * n + p)
        num = tl.load(counts + rank * n + p)
        tl.store(out_tables + p, there)
        tl.store(out_tables + n + p, there + num)
        tl.store(out_tables + 2 * n + p, p)
        tl.store(out_tables + 3 * n + p, rank)  # announced on the channel of the sender
        comes = tl.load(counts + p * n + rank)
        tl.store(in_tables + p, here)
        tl.store(in_tables + n + p, here + comes)
        tl.store(in_tables + 2 * n + p, p)
        tl.store(in_tables + 3 * n + p, p)
        here += comes
        tl.store(in_tables + 4 * n + p, (comes > 0).to(tl.int32))


@triton.jit
def send(world, made, x, targets, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Program p: the rows for rank p, closed up, in their order."""
    p = tl.program_id(0)
    wanted = (tl.load(targets + tl.arange(0, ROWS)) == p).to(tl.int32)
    place = tl.cumsum(wanted, axis=0) - 1
    # Row j of the tile is the row of x that is wanted j-th.
    rows = tl.arange(0, ROWS)
    chosen = (place[None, :] == rows[:, None]) & (wanted[None, :] == 1)
    source = tl.sum(tl.where(chosen, rows[None, :], 0), axis=1)
    values = tl.load(x + source[:, None] * COLS + tl.arange(0, COLS)[None, :])
    wl.tile_push(world, made, p, 0, values, p)
    # weft: equivalent-mutant value+1 of notify: a channel of one round, and of one tile
    wl.tile_notify(world, made, p, p)


@triton.jit
def receive(world, used, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Program p: double the rows that have come from rank p."""
    p = tl.program_id(0)
    wl.tile_wait(world, used, p)
    pointers, inside = wl.tile_pointers(used, p, 0, ROWS, COLS)
    first, end = wl.f_shape(p, used.mapping)
    at = (first + tl.arange(0, ROWS))[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + at, 2 * tl.load(pointers, mask=inside, other=0.0), mask=inside)


def tokens(rank, n):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, COLS, generator=generator)
    return x, torch.randint(0, n, (ROWS,), generator=generator, dtype=torch.int32)


def main():
    world = weft.init()
    n = world.num_ranks
    x, targets = (each.to(world.device) for each in tokens(world.rank, n))
    counts = world.zeros((n, n), torch.int32)
    out_tables, in_tables = torch.zeros(2, 5, n, dtype=torch.int32, device=world.device)
    channel = world.channel("tokens", (n * ROWS, COLS), torch.float32, num_tiles=n)
    out = torch.zeros(n * ROWS, COLS, device=world.device)

    plan[(1,)](world.arg, targets, counts, world.signals(n), out_tables, in_tables, ROWS)
    send[(n,)](world.arg, channel.tabled(*out_tables), x, targets, ROWS, COLS)
    receive[(n,)](world.arg, channel.tabled(*in_tables), out, ROWS, COLS)

    everyone = [tokens(rank, n) for rank in range(n)]
    expected = 2 * torch.cat([x[targets == world.rank] for x, targets in everyone])
    got = out[: len(expected)].cpu()
    assert torch.equal(got, expected), f"rank {world.rank} received the wrong rows"
    print(f"rank {world.rank} received {len(expected)} rows")
    world.close()


if __name__ == "__main__":
    main()
