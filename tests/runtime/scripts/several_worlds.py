"""Several worlds in one process: of all ranks, twice, and of a part of them; torchrun or emulated.

Each has its own heap, signals and mailboxes; calls on them take turns, eager and replayed, and
every answer is exact. Prints one line for each rank.
"""

import os

import torch
import torch.distributed as dist

import weft
from weft.ops import all_gather, all_reduce, all_to_all, reduce_scatter


def check(world, seed):
    """All operators once; ranks of a world count from 0, whoever they are elsewhere."""
    n, rank = world.num_ranks, world.rank
    x = torch.arange(8.0 * n, device=world.device).reshape(4 * n, 2) + 100 * rank + seed
    every = [x - 100 * rank + 100 * other for other in range(n)]
    rows = slice(4 * rank, 4 * rank + 4)
    assert torch.equal(all_reduce(x, world=world), sum(every))
    shards = [every[r][4 * r : 4 * r + 4] for r in range(n)]
    assert torch.equal(all_gather(x[rows], world=world), torch.cat(shards))
    assert torch.equal(reduce_scatter(x, world=world), sum(every)[rows])
    assert torch.equal(all_to_all(x, world=world), torch.cat([one[rows] for one in every]))


def main():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    everyone = weft.init(heap_bytes=64 << 20)
    again = weft.init(heap_bytes=64 << 20)
    rank = dist.get_rank()
    members = [list(range(0, dist.get_world_size(), 2)), list(range(1, dist.get_world_size(), 2))]
    groups = [dist.new_group(ranks) for ranks in members]
    part = weft.init(group=groups[rank % 2], name=f"part {rank % 2}", heap_bytes=64 << 20)
    assert part.num_ranks == len(members[rank % 2]) and part.rank == rank // 2
    worlds = [everyone, again, part]
    assert len({world.name for world in worlds}) == 3
    for seed in range(3):
        for world in worlds:
            check(world, seed)
    x = torch.full((100,), 1.0 + rank, device=everyone.device)
    out = torch.empty_like(x)
    all_reduce(x, world=part, out=out)
    all_reduce(x, world=again, out=out)
    with everyone.record() as recording:
        all_reduce(x, world=part, out=out)
        all_reduce(out, world=again, out=out)
    size = dist.get_world_size()
    sums = [sum(1.0 + other for other in ranks) * len(ranks) for ranks in members]
    for turn in range(3):
        check(part, turn)
        recording.replay()
        check(everyone, turn)
        assert out[0].item() == out[-1].item() == sum(sums), (out[0].item(), sums)
    for world in worlds:
        world.synchronize()
    for world in reversed(worlds):
        world.close()
    print(f"rank {rank} of {size}, process {os.getpid()}: {len(worlds)} worlds", flush=True)


if __name__ == "__main__":
    main()
