"""Worlds of one name over several groups, which share ranks or share none; torchrun or emulated.

Rank 0 has a world more than the others, so one world has another name there. Each world sums over
its own ranks. Prints one line for each rank.
"""

import os

import torch
import torch.distributed as dist

import weft
from weft.ops import all_reduce

NAME = "tp"


def main():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # weft.init starts torch's default group, whose ranks then make others.
    everyone = weft.init(heap_bytes=16 << 20)
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)]
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    half = [dist.new_group(ranks) for ranks in halves][rank >= size // 2]
    whole = dist.new_group(list(range(size)))
    groups = [alone[0]] if rank == 0 else []
    groups += [whole, alone[rank], half]
    worlds = [weft.init(group=group, name=NAME, heap_bytes=16 << 20) for group in groups]
    for group, world in zip(groups, worlds, strict=True):
        members = dist.get_process_group_ranks(group)
        assert world.backend.seats.global_ranks == tuple(members)
        x = torch.full((64,), 1.0 + rank, device=world.device)
        expected = sum(1.0 + other for other in members)
        assert all_reduce(x, world=world).eq(expected).all(), (world, members)
    names = " ".join(world.name for world in worlds)
    everyone.synchronize()
    for world in (*reversed(worlds), everyone):
        world.close()
    print(f"rank {rank} of {size}: {names}", flush=True)


if __name__ == "__main__":
    main()
