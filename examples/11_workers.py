"""11. Workers: one persistent launch, one program communicates, the others compute.

Tasks form a graph across ranks: level by level every rank averages its tile with its neighbour's.
Computing workers draw tasks by ticket; the communicating program hands results on.

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


@triton.jit
def smooth(world, computed, arrived, counter, own, theirs, num_tasks, num_tiles, num_workers,
           TILE: tl.constexpr):  # fmt: skip
    """Task t makes tile t % num_tiles of level t // num_tiles + 1, in row t + num_tiles.

    computed[t]: this rank's tile of task t is in `own`; arrived[t]: its left neighbour's is in
    `theirs`.
    """
    at = tl.arange(0, TILE)
    if tl.program_id(0) < num_workers:
        t = wl.next_task(counter, num_tasks, num_workers)
        while t < num_tasks:
            if t >= num_tiles:  # what level 0 holds is given
                before = (
                    t - num_tiles
                )  # done by any of the workers, of this rank and of the left one
                # weft: equivalent-mutant count+1 of wait: another worker is at the task behind it
                wl.wait(computed + before, at_least=1, scope=wl.Scope.DEVICE, world=world)
                # weft: equivalent-mutant count+1 of wait: the task behind it needs nothing of this
                wl.wait(arrived + before, at_least=1, world=world)
            mean = (tl.load(own + t * TILE + at) + tl.load(theirs + t * TILE + at)) / 2
            tl.store(own + (t + num_tiles) * TILE + at, mean)
            # weft: equivalent-mutant value+1 of notify: each task is done once, and waited for once
            wl.notify(world, computed + t, to=wl.rank(world), scope=wl.Scope.DEVICE)
            # weft: equivalent-mutant drop, value of store: the counter is made for one launch
            t = wl.next_task(counter, num_tasks, num_workers)
    else:
        right = (wl.rank(world) + 1) % wl.num_ranks(world)
        for t in range(num_tasks):
            wl.wait(computed + t, at_least=1, scope=wl.Scope.DEVICE, world=world)
            values = tl.load(own + (t + num_tiles) * TILE + at)
            wl.put(world, theirs + (t + num_tiles) * TILE + at, values, to=right)
            # weft: equivalent-mutant value+1 of notify: each task is done once, and waited for once
            wl.notify(world, arrived + t, to=right)


def main():
    world = weft.init()
    n, num_tasks = world.num_ranks, LEVELS * TILES
    on_device = {"device": world.device}
    own = torch.zeros(LEVELS + 1, TILES * TILE, **on_device)
    theirs = world.zeros((LEVELS + 1, TILES * TILE), torch.float32)
    start = torch.arange(TILES * TILE, **on_device) + 64.0 * torch.arange(n, **on_device)[:, None]
    own[0], theirs[0] = start[world.rank], start[world.rank - 1]
    computed, arrived = world.signals(num_tasks), world.signals(num_tasks)
    counter = torch.zeros(1, dtype=torch.int32, **on_device)

    smooth[(WORKERS + 1,)](
        world.arg,
        computed,
        arrived,
        counter,
        own,
        theirs,
        num_tasks,
        TILES,
        WORKERS,
        TILE,
        launch_cooperative_grid=True,
    )

    expected = start
    for _ in range(LEVELS):
        expected = (expected + expected.roll(1, 0)) / 2
    assert torch.equal(own[LEVELS], expected[world.rank]), f"rank {world.rank} averaged wrongly"
    print(f"rank {world.rank} did {num_tasks} tasks with {WORKERS} computing workers")
    world.close()


if __name__ == "__main__":
    main()
