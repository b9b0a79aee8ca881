"""Calls by copy engines whose result lies where another one lay that went back to the device.

torchrun --nproc-per-node 2 tests/runtime/scripts/memory_comes_again.py
"""

import torch

import weft
from weft.ops import all_gather, card
from weft.runtime import replays

ROWS, COLUMNS = 1 << 11, 1 << 10
ROUNDS = 4
# Allocations that are tried for one at the first round's address; the misfits are held meanwhile,
# so that the device has fewer other places to give.
TRIES = 64


def allocate_at(address: int | None, world: weft.World) -> torch.Tensor:
    """Fresh memory of the device for a result, at `address` if that is given.

    Raises  AssertionError: it lies elsewhere each time; the old recordings are then not tried
    """
    misfits = []
    for _ in range(TRIES):
        out = torch.empty(ROWS * world.num_ranks, COLUMNS, device=world.device)
        if address in (None, out.data_ptr()):
            return out
        misfits.append(out)
    places = sorted({hex(one.data_ptr()) for one in misfits})
    raise AssertionError(f"{address:#x} did not come again in {TRIES} allocations: {places}")


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
    config = card("all_gather").config(transport="copy_engine")
    x = torch.full((ROWS, COLUMNS), world.rank + 1.0, device=world.device)
    expected = torch.arange(1, world.num_ranks + 1, device=world.device) * x.numel()
    made = count_recordings(world)
    # Each round each slot's work is recorded, and replayed once.
    num_slots = world.settings.slots
    num_calls = num_slots * (replays.SIGHTINGS + 1)
    right, address = 0, None
    for number in range(ROUNDS):
        out = allocate_at(address, world)
        address = out.data_ptr()
        for _ in range(num_calls):
            out.zero_()
            all_gather(x, world=world, config=config, out=out)
            sums = out.view(world.num_ranks, -1).sum(1, dtype=torch.float64)
            right += int(torch.equal(sums, expected.double()))
        # In the first round none is there yet; later ones must drop those of the round before.
        assert len(made) == (number + 1) * num_slots, (number, len(made))
        del out
        world.synchronize()
        torch.cuda.empty_cache()
    world.barrier()
    world.synchronize()
    calls = ROUNDS * num_calls
    print(f"rank {world.rank} of {world.num_ranks}: right {right} of {calls} times at one address")
    world.close()


if __name__ == "__main__":
    main()
