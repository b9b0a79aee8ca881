"""What no run on a CPU shows of launches: descriptors of peers by hop, places on SMs."""

from __future__ import annotations

import pytest
import torch

from weft.base.parts import full_part
from weft.base.target import TARGETS
from weft.plan import launches
from weft.plan.launches import THREADS_OF_SM
from weft.plan.row_launches import RowBlocking, Rows
from weft.tiles.hooks import scatter


class Sized:
    """A product of 21 rows, of which four ranks have 6, 6, 6 and 3; or of 5: 2, 2, 1 and none."""

    n, k, itemsize, b_is_nk = 64, 32, 2, False

    def __init__(self, m: int) -> None:
        self.m = m


class World:
    """Ranks whose tensors are told apart by their first address."""

    num_ranks = 4

    def __init__(self, rank: int, arrays: list[torch.Tensor]) -> None:
        self.rank, self.arrays = rank, arrays

    def peers(self, array: torch.Tensor, peers: list[int]) -> list[torch.Tensor]:
        return [self.arrays[peer] for peer in peers]


def described(rank: int, *shape: int, m: int = 21) -> list[tuple[int, int]]:
    """(whose, from which element on) of what tiles of `rank` leave by."""
    arrays = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(4)]
    parts = launches.parts_of(Sized(m), full_part(m, 4), 4, (128, 64), True, 8, 3, 8)
    found = launches.describe_peers(World(rank, arrays), arrays[rank], parts, (16, 64))
    assert len(found) == scatter.MOST_PEERS
    owners = [
        next(i for i, one in enumerate(arrays) if _holds(one, rows.base.data_ptr()))
        for rows in found
    ]
    return [
        (owner, (rows.base.data_ptr() - arrays[owner].data_ptr()) // 2)
        for owner, rows in zip(owners, found)
    ]


def _holds(array: torch.Tensor, address: int) -> bool:
    return 0 <= address - array.data_ptr() < array.numel() * array.element_size()


def test_peers_come_by_hop_and_the_last_stands_for_those_that_are_not_there():
    # A part of 16 rows for each source: that of rank 1.
    assert described(1, 4, 16, 64)[:4] == [(2, 16 * 64), (3, 16 * 64), (0, 16 * 64), (0, 16 * 64)]
    # All rows: those of rank 2 begin at row 12.
    assert described(2, 21, 64)[:3] == [(3, 12 * 64), (0, 12 * 64), (1, 12 * 64)]


def test_b_is_read_in_blocks_that_are_powers_of_two():
    assert launches.block_of_b(160, 64, True, is_sm90=True) == (32, 64)
    assert launches.block_of_b(320, 64, True, is_sm90=True) == (64, 64)
    assert launches.block_of_b(384, 64, False, is_sm90=True) == (64, 128)
    assert launches.block_of_b(256, 32, False, is_sm90=True) == (32, 256)
    assert launches.block_of_b(256, 64, True, is_sm90=False) == (256, 64)


def test_a_rank_without_rows_describes_something_all_the_same():
    assert described(3, 5, 64, m=5)[:3] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("n", [512, 4096, 7168, 20000])
@pytest.mark.parametrize("m", [64, 1000, 1056, 65536])
def test_rows_leave_a_relay_its_places_on_sms(n, m):
    """Programs that are not all on SMs at once would wait for each other: none has more threads and
    registers than its share of an SM, or than an SM of its own."""
    target, spare = TARGETS["cuda:90"], 16
    sized, cut = Rows(m, n, m // 8, 8), RowBlocking.of(False, m, n, target)
    programs = cut.grid(sized, target, spare) + spare
    options = cut.options(sized, target, spare)
    together = THREADS_OF_SM // (32 * options["num_warps"]) if "maxnreg" in options else 1
    assert programs <= target.num_sms * together
    assert spare < programs <= spare + 8 * -(-m // 8 // cut.tile_m)
