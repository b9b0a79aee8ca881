"""08. Packets: data and its flag in one word, for messages so small that a signal is half the time.

A one-shot all-reduce, as a decode step needs it: no signal, no fence, no barrier. Two halves of the
inbox take turns, and that is enough: who has my packet of round e has read all of round e - 1.

    weft emulate examples/08_low_latency_packet.py --ranks 4
    torchrun --nproc-per-node 4 examples/08_low_latency_packet.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

SIZE, ROUNDS = 128, 4


@triton.jit
def all_reduce(world, values, inbox, out, rounds, size: tl.constexpr):
    rank = wl.rank(world)
    n = wl.num_ranks(world)
    at = tl.arange(0, size)
    total = tl.load(values + at)
    for e in range(1, rounds + 1):
        half = inbox + (e % 2) * n * size
        for step in range(n):
            peer = (rank + step) % n
            # The flag is another one in every round, and never 0: zeroed words hold that.
            # weft: equivalent-mutant peer+1 of at: every peer is reached, in another order
            wl.put_packets(world, half + rank * size + at, total, e, to=peer)
        total = tl.zeros((size,), tl.float32)
        for source in range(n):
            total += wl.wait_packets(half + source * size + at, e, dtype=tl.float32)
    tl.store(out + at, total)


def main():
    world = weft.init()
    n = world.num_ranks
    values = torch.arange(SIZE, device=world.device) + 1.0 * world.rank
    inbox = world.zeros((2, n, SIZE), torch.int64)  # a packet is a word of 8 bytes
    out = torch.empty(SIZE, device=world.device)

    all_reduce[(1,)](world.arg, values, inbox, out, ROUNDS, SIZE)

    expected = (n * torch.arange(SIZE) + n * (n - 1) / 2) * n ** (ROUNDS - 1)
    assert torch.equal(out.cpu(), expected), f"the sum on rank {world.rank} is wrong"
    print(f"rank {world.rank} summed {ROUNDS} rounds of packets")
    world.close()


if __name__ == "__main__":
    main()
