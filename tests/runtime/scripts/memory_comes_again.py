"""Calls by copy engines whose result lies where another one lay that went back to the device.

torchrun --nproc-per-node 2 tests/runtime/scripts/memory_comes_again.py
"""

import torch

import weft
from weft.ops import all_gather, card
from weft.runtime import replays

ROWS, COLUMNS = 1 << 11, 1 << 10
# Each recording takes memory of the device too, perhaps what a result has just left: one a round
# leaves most addresses to come again. Whether one does is the driver's choice.
ROUNDS = 8


def count_recordings(world: weft.World) -> list[object]:
    """The recordings that the world's backend makes from here on, one entry each."""
    made: list[object] = []
    record = world.backend.record_launches

    def record_and_count(launch):
        made.append(launch)
        return record(launch)

    world.backend.record_launches = record_and_count
    return made


def main() -> None:
    world = weft.init()
    config = card("all_gather").config(transport="ce_pull")
    x = torch.full((ROWS, COLUMNS), world.rank + 1.0, device=world.device)
    expected = torch.arange(1, world.num_ranks + 1, device=world.device) * x.numel()
    made = count_recordings(world)
    # Slots take turns. An odd number of calls, so that each slot is the recorded one by turns.
    num_calls = world.settings.slots * (replays.SIGHTINGS - 1) + 1
    right, numbers, where, num_again = 0, set(), set(), 0
    for number in range(ROUNDS):
        out = torch.empty(ROWS * world.num_ranks, COLUMNS, device=world.device)
        num_again += out.data_ptr() in where
        where.add(out.data_ptr())
        numbers.add(world.backend._driver.allocation_of(out.data_ptr()))
        for _ in range(num_calls):
            out.zero_()
            all_gather(x, world=world, config=config, out=out)
            sums = out.view(world.num_ranks, -1).sum(1, dtype=torch.float64)
            right += int(torch.equal(sums, expected.double()))
        # Also where an earlier round's recording has the same addresses: it must be dropped.
        assert len(made) == number + 1, (number, len(made))
        # What recordings are told apart by: no allocation has the number of an earlier one.
        assert len(numbers) == number + 1, (number, numbers)
        del out
        world.synchronize()
        torch.cuda.empty_cache()
    world.barrier()
    world.synchronize()
    calls = ROUNDS * num_calls
    again = f"addresses that came again: {num_again}"
    print(f"rank {world.rank} of {world.num_ranks}: right {right} of {calls} times; {again}")
    world.close()


if __name__ == "__main__":
    main()
