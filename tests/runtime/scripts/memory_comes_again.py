"""Calls by copy engines whose result lies where another one lay that went back to the device.

torchrun --nproc-per-node 2 tests/runtime/scripts/memory_comes_again.py
"""

import torch

import weft
from weft.ops import all_gather, card
from weft.runtime import replays

ROWS, COLUMNS = 1 << 11, 1 << 10
ROUNDS = 4


def main() -> None:
    world = weft.init()
    config = card("all_gather").config(transport="copy_engine")
    x = torch.full((ROWS, COLUMNS), world.rank + 1.0, device=world.device)
    right, where = 0, []
    for _ in range(ROUNDS):
        out = torch.empty(ROWS * world.num_ranks, COLUMNS, device=world.device)
        where.append(out.data_ptr())
        for _ in range(replays.SIGHTINGS + 2):
            out.zero_()
            all_gather(x, world=world, config=config, out=out)
            sums = out.view(world.num_ranks, -1).sum(1, dtype=torch.float64)
            expected = torch.arange(1, world.num_ranks + 1, device=world.device) * x.numel()
            right += int(torch.equal(sums, expected.double()))
        del out
        world.synchronize()
        torch.cuda.empty_cache()
    world.barrier()
    world.synchronize()
    assert right == ROUNDS * (replays.SIGHTINGS + 2), right
    is_again = len(set(where)) < len(where)
    print(f"rank {world.rank} of {world.num_ranks}: right {right} times, came again: {is_again}")
    world.close()


if __name__ == "__main__":
    main()
