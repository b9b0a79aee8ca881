"""11. Workers: one persistent launch, some programs communicate, the others compute.

Tasks form a graph across ranks: level by level every rank averages its tile with its neighbour's.
Computing workers draw tasks by ticket; whoever communicates hands results on.

    weft emulate examples/11_workers.py --ranks 4
    torchrun --nproc-per-node 4 examples/11_workers.py
    weft verify examples/11_workers.py --exhaustive -- 2 1 2
"""

import sys

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

# How large: levels, tiles and computing workers, also as the script's own arguments.
LEVELS, TILES, WORKERS = map(int, sys.argv[1:] or (3, 4, 3))
TILE = 64
SPLIT = wl.Split(communicate=1, compute=WORKERS)


@triton.jit
def smooth(world, split, tasks, computed, counter, own, theirs, num_tasks, num_tiles,
           TILE: tl.constexpr):  # fmt: skip
    """Task t is tile t % num_tiles of level t // num_tiles; level 0 is given."""
    role, index, num = wl.worker_role(tl.program_id(0), split)
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    at = tl.arange(0, TILE)
    if role == wl.COMPUTE:
        t = wl.next_task(counter, num_tasks, num)
        while t < num_tasks:
            # weft: equivalent-mutant count+1 of wait: the task behind it needs nothing of this one
            wl.wait_deps(world, tasks, t)  # the left neighbour's tile of this level is in `theirs`
            if t >= num_tiles:  # ours was made by any of this rank's workers
                own_ready = computed + t - num_tiles
                # weft: equivalent-mutant count+1 of wait: another worker is at the task behind it
                wl.wait(own_ready, at_least=1, scope=wl.Scope.DEVICE, world=world)
            mean = (tl.load(own + t * TILE + at) + tl.load(theirs + t * TILE + at)) / 2
            tl.store(own + (t + num_tiles) * TILE + at, mean)
            # weft: equivalent-mutant value+1 of notify: each task is done once, and waited for once
            wl.notify(world, computed + t, to=wl.rank(world), scope=wl.Scope.DEVICE)
            # weft: equivalent-mutant drop, value of store: the counter is made for one launch
            t = wl.next_task(counter, num_tasks, num)
    else:
        for t in range(index, num_tasks, num):
            # The right neighbour's task of the next level needs our tile.
            wl.wait(computed + t, at_least=1, scope=wl.Scope.DEVICE, world=world)
            values = tl.load(own + (t + num_tiles) * TILE + at)
            wl.put(world, theirs + (t + num_tiles) * TILE + at, values, to=right)
            # weft: equivalent-mutant value+1 of notify: there is one round, of epoch 1
            wl.release_tile(world, tasks, t + num_tiles, right)


def main():
    world = weft.init()
    n, num_tasks = world.num_ranks, LEVELS * TILES
    on_device = {"device": world.device}
    # Task t waits for the left neighbour's task of the level before, which stands at t itself.
    tasks = wl.TaskTable(
        first_dep=torch.arange(num_tasks + 1, dtype=torch.int32, **on_device),
        deps=torch.arange(num_tasks, dtype=torch.int32, **on_device),
        done=world.signals(num_tasks + TILES, torch.int64),
        epoch=torch.zeros(1, dtype=torch.int64, **on_device),
    )
    own = torch.zeros(LEVELS + 1, TILES * TILE, **on_device)
    theirs = world.zeros((LEVELS + 1, TILES * TILE), torch.float32)
    start = torch.arange(TILES * TILE, **on_device) + 64.0 * torch.arange(n, **on_device)[:, None]
    own[0], theirs[0] = start[world.rank], start[world.rank - 1]
    tasks.done[:TILES] = 1  # level 0 is there; nobody else writes these words

    smooth[(SPLIT.num_programs,)](
        *(world.arg, SPLIT.as_constexpr(), tasks, world.signals(num_tasks)),
        *(torch.zeros(1, dtype=torch.int32, **on_device), own, theirs, num_tasks, TILES, TILE),
        launch_cooperative_grid=True,
    )

    expected = start
    for _ in range(LEVELS):
        expected = (expected + expected.roll(1, 0)) / 2
    assert torch.equal(own[LEVELS], expected[world.rank]), f"rank {world.rank} averaged wrongly"
    print(f"rank {world.rank} did {num_tasks} tasks with {SPLIT.compute} computing workers")
    world.close()


if __name__ == "__main__":
    main()
