"""07. All-reduce in two shots: everybody sums one part of the vector, then hands it to all.

Called again and again on a slot: the slot's epoch takes the place of the numbers that a host would
have to count, and its credits that of the second barrier.

    weft emulate examples/07_all_reduce.py --ranks 4
    torchrun --nproc-per-node 4 examples/07_all_reduce.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

TILE, ROUNDS = 64, 3  # elements of each rank's part


@triton.jit
def all_reduce(world, slot, values, parts, sums, part_ready, sum_ready, out, tile: tl.constexpr):
    rank = wl.rank(world)
    n = wl.num_ranks(world)
    at = tl.arange(0, tile)
    e = wl.slot_epoch(slot)
    # Every rank has finished the slot's call before. In two shots that is known already: who begins
    # a round has all sums of the last one, and hands out its own once all have begun this one.
    # weft: equivalent-mutant drop, relax, value-1, count-1 of wait: as the lines above say
    wl.slot_wait_free(world, slot, e)
    for step in range(n):  # first shot: part p goes to rank p
        peer = (rank + step) % n
        part = tl.load(values + peer * tile + at)
        wl.put_signal(world, parts + rank * tile + at, part, part_ready + rank, e, to=peer)
    total = tl.zeros((tile,), tl.float32)
    for source in range(n):  # in the same order everywhere: equal to the last bit
        wl.wait(part_ready + source, at_least=e)
        total += tl.load(parts + source * tile + at)
    for step in range(n):  # second shot: the sum goes to everybody
        peer = (rank + step) % n
        # weft: equivalent-mutant peer+1 of at: the own sum comes last then, for this same program
        wl.put_signal(world, sums + rank * tile + at, total, sum_ready + rank, e, to=peer)
    for source in range(n):
        wl.wait(sum_ready + source, at_least=e)
        tl.store(out + source * tile + at, tl.load(sums + source * tile + at))
    # weft: equivalent-mutant relax, value+1 of notify: see slot_wait_free
    wl.slot_close(world, slot, e)


def main():
    world = weft.init()
    n = world.num_ranks
    for turn in range(ROUNDS):
        slot = world.workspace(
            "all_reduce",
            buffers={"parts": ((n, TILE), torch.float32), "sums": ((n, TILE), torch.float32)},
            signals={"part_ready": (n, torch.int64), "sum_ready": (n, torch.int64)},
        )
        values = torch.arange(n * TILE, device=world.device) * (turn + 1.0) + world.rank
        out = torch.empty(n * TILE, device=world.device)
        all_reduce[(1,)](
            *(world.arg, slot.arg, values, slot.parts, slot.sums),
            *(slot.part_ready, slot.sum_ready, out, TILE),
        )
        expected = n * torch.arange(n * TILE) * (turn + 1.0) + n * (n - 1) / 2
        assert torch.equal(out.cpu(), expected), f"round {turn} on rank {world.rank} is wrong"
    print(f"rank {world.rank} summed {ROUNDS} rounds")
    world.close()


if __name__ == "__main__":
    main()
