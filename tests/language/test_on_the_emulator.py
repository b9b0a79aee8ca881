"""The programs of test_on_one_gpu, whose meaning the emulator gives: same kernels, all checks."""

from __future__ import annotations

import pytest
import torch
from test_on_one_gpu import (
    all_to_all,
    count_up,
    everyone_announces,
    exchange_through_a_slot,
    read_and_write_words,
    rendezvous,
    wait_for_nobody,
)

import weft


@pytest.mark.parametrize("word", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_was_put_before_a_notify_is_seen_after_the_wait(ranks, word, num_ranks):
    size, calls = 64, 3

    def main():
        world = weft.init()
        inbox = world.empty((num_ranks, size), torch.float32)
        arrived = world.signals(num_ranks, word)
        out = torch.zeros(num_ranks, size)
        x = torch.arange(size) + 100.0 * world.rank
        for e in range(1, calls + 1):
            all_to_all[(1,)](world.arg, x + e, inbox, out, arrived, e, SIZE=size)
        world.synchronize()
        return out

    for rank, out in enumerate(ranks(main, num_ranks)):
        expected = [torch.arange(size) + 100.0 * peer + calls + rank for peer in range(num_ranks)]
        assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_the_grid_barrier_is_ready_again_at_once(ranks, programs):
    def main():
        world = weft.init()
        counter = torch.zeros(1, dtype=torch.int32)
        for _ in range(2):
            visited = torch.zeros(1, dtype=torch.int32)
            values = torch.zeros(programs + 1, dtype=torch.int32)
            count_up[(programs,)](
                world.arg, counter, visited, values, 3, launch_cooperative_grid=True
            )
            world.synchronize()
            assert values.tolist() == [3] * programs + [0]

    ranks(main, 1)


def test_the_world_barrier_over_many_rounds(ranks):
    def main():
        world = weft.init()
        marks = world.zeros((world.num_ranks,), torch.int32)
        ok = torch.ones(1, dtype=torch.int32)
        rendezvous[(1,)](world.arg, marks, ok, 4)
        world.synchronize()
        return ok.item()

    assert ranks(main, 4) == [1] * 4


def test_a_slot_guards_its_buffers_over_back_to_back_calls(ranks):
    programs, size, calls = 3, 16, 4

    def main():
        world = weft.init()
        torch.manual_seed(world.rank)
        x = torch.randn(calls, programs * size)
        out = torch.zeros(calls, programs * size)
        for call in range(calls):
            slot = world.workspace(
                "exchange",
                buffers={"inbox": ((programs * size,), torch.float32)},
                signals={"rows_ready": (programs, torch.int64)},
            )
            exchange_through_a_slot[(programs,)](
                world.arg, slot.arg, x[call], slot.inbox, out[call], slot.rows_ready, SIZE=size
            )
        world.synchronize()
        return x, out

    results = ranks(main, 4)
    for rank, (_, out) in enumerate(results):
        assert torch.equal(out, results[rank - 1][0])


def test_ordered_access(ranks):
    def main():
        weft.init()
        x32 = torch.full((1,), 10, dtype=torch.int32)
        x64 = torch.full((1,), 1 << 40, dtype=torch.int64)
        f32 = torch.full((1,), 1.25)
        seen = torch.zeros(6, dtype=torch.int64)
        read_and_write_words[(1,)](x32, x64, f32, seen)
        assert seen.tolist() == [10, 1 << 40, 15, 1 << 20, 1, 0]
        assert (x64.item(), f32.item()) == (-7, 2.5)

    ranks(main, 1)


def test_a_wait_in_vain_is_a_deadlock(ranks):
    def main():
        world = weft.init()
        signal = world.signals(2)
        wait_for_nobody[(1,)](world.arg, signal, 5)
        world.synchronize()

    with pytest.raises(weft.FindingError, match=r"(?s)# in vain"):
        ranks(main, 4)


def test_notify_all_reaches_every_rank(ranks):
    def main():
        world = weft.init()
        ready = world.signals(world.num_ranks + 1)
        seen = torch.zeros(1, dtype=torch.int32)
        everyone_announces[(1,)](world.arg, ready, seen)
        world.synchronize()
        return ready.tolist(), seen.item()

    assert ranks(main, 3) == [([7, 7, 7, 3], 3)] * 3
