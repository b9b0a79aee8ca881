"""12. A mapping made at run time: how many rows go where is known to the device alone.

Every rank sends its rows to the ranks that they name, as tokens go to experts. The ranks tell each
other how many; each adds up where its rows begin on every other. The host never learns the numbers.

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
def plan(world, targets, counts, counts_ready, first_there, first_here, ROWS: tl.constexpr):
    """Count, tell everybody, add up: counts[source, p] rows go from rank `source` to rank p.

    first_there[p]: where this rank's rows begin on rank p; first_here[p]: where rank p's do here.
    """
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
    for p in range(n):
        there = 0
        for source in range(rank):
            there += tl.load(counts + source * n + p)
        tl.store(first_there + p, there)
        tl.store(first_here + p, here)
        here += tl.load(counts + p * n + rank)


@triton.jit
def send(world, counts, first_there, inbox, rows_ready, x, targets, ROWS: tl.constexpr,
         COLS: tl.constexpr):  # fmt: skip
    """Program p: the rows for rank p, closed up, in their order."""
    rank = wl.rank(world)
    p = tl.program_id(0)
    wanted = (tl.load(targets + tl.arange(0, ROWS)) == p).to(tl.int32)
    place = tl.cumsum(wanted, axis=0) - 1
    # Row j of the tile is the row of x that is wanted j-th.
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    chosen = (place[None, :] == rows[:, None]) & (wanted[None, :] == 1)
    source = tl.sum(tl.where(chosen, rows[None, :], 0), axis=1)
    values = tl.load(x + source[:, None] * COLS + cols[None, :])
    at = (tl.load(first_there + p) + rows)[:, None] * COLS + cols[None, :]
    inside = (rows < tl.load(counts + rank * wl.num_ranks(world) + p))[:, None]
    wl.put(world, inbox + at, values, to=p, mask=inside)
    # weft: equivalent-mutant value+1 of notify: they are told once
    wl.notify(world, rows_ready + rank, to=p)


@triton.jit
def receive(world, counts, first_here, inbox, rows_ready, out, ROWS: tl.constexpr,
            COLS: tl.constexpr):  # fmt: skip
    """Program p: double the rows that have come from rank p."""
    p = tl.program_id(0)
    wl.wait(rows_ready + p, at_least=1)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    at = (tl.load(first_here + p) + rows)[:, None] * COLS + cols[None, :]
    inside = (rows < tl.load(counts + p * wl.num_ranks(world) + wl.rank(world)))[:, None]
    tl.store(out + at, 2 * tl.load(inbox + at, mask=inside, other=0.0), mask=inside)


def tokens(rank, n):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, COLS, generator=generator)
    return x, torch.randint(0, n, (ROWS,), generator=generator, dtype=torch.int32)


def main():
    world = weft.init()
    n = world.num_ranks
    x, targets = (each.to(world.device) for each in tokens(world.rank, n))
    counts = world.zeros((n, n), torch.int32)
    first_there, first_here = torch.zeros(2, n, dtype=torch.int32, device=world.device)
    inbox, rows_ready = world.empty((n * ROWS, COLS), torch.float32), world.signals(n)
    out = torch.zeros(n * ROWS, COLS, device=world.device)

    plan[(1,)](world.arg, targets, counts, world.signals(n), first_there, first_here, ROWS)
    send[(n,)](world.arg, counts, first_there, inbox, rows_ready, x, targets, ROWS, COLS)
    receive[(n,)](world.arg, counts, first_here, inbox, rows_ready, out, ROWS, COLS)

    everyone = [tokens(rank, n) for rank in range(n)]
    expected = 2 * torch.cat([x[targets == world.rank] for x, targets in everyone])
    got = out[: len(expected)].cpu()
    assert torch.equal(got, expected), f"rank {world.rank} received the wrong rows"
    print(f"rank {world.rank} received {len(expected)} rows")
    world.close()


if __name__ == "__main__":
    main()
