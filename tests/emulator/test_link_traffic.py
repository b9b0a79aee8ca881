"""Bytes from rank to rank: by stores near and far, by loads, by packets, and by copy engines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

HEAP = 1 << 16


@triton.jit
def put_row(world, x, arrived, n, to, block: tl.constexpr):
    i = tl.arange(0, block)
    wl.put(world, x + i, x + i, to=to, mask=i < n)
    wl.notify(world, arrived, 1, to=to)


@triton.jit
def await_row(arrived):
    wl.wait(arrived, 1)


@triton.jit
def get_word(world, x, out, source):
    tl.store(out, tl.load(wl.at(world, x, source)))


def test_stores_and_loads_by_who_has_the_data_before_and_after():
    def main():
        world = weft.init(heap_bytes=HEAP)
        x, arrived = world.zeros((64,), torch.int32), world.signals(1)
        world.barrier()
        if world.rank == 0:
            put_row[(1,)](world.arg, x, arrived, 10, 1, 64)
            put_row[(1,)](world.arg, x, arrived, 3, 2, 64)
        if world.rank in (1, 2):
            await_row[(1,)](arrived)
        world.barrier()
        if world.rank == 3:
            get_word[(1,)](world.arg, x, torch.zeros(1, dtype=torch.int32), 2)
        world.synchronize()

    with weft.emulated(nodes=(2, 2)) as session:
        session.run(main)
        # A signal that is set is none of it; a load moves what it reads.
        assert session.traffic == {(0, 1): 40, (0, 2): 12, (2, 3): 4}
        assert session.traffic.between_nodes(session.topology) == {(0, 1): 12}


def test_copies_of_engines_are_the_ranks_that_queue_them():
    def main():
        world = weft.init(heap_bytes=HEAP)
        x = world.zeros((16,), torch.int64)
        world.barrier()
        if world.rank == 1:
            world.copy(world.peer(x, 0)[:5], x[:5])
        world.synchronize()

    with weft.emulated(ranks=2) as session:
        session.run(main)
        assert session.traffic == {(1, 0): 40}
        assert not session.traffic.between_nodes(session.topology)
