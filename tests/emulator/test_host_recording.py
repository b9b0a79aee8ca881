"""Recording and replay of a rank's work: launches, copies, streams, torch operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.base.errors import OutOfBoundsError
from weft.emulator.observation import Recorder
from weft.runtime.replays import SIGHTINGS


@triton.jit
def add_one(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + 1)


def on_one_rank(main, **options):
    def with_world():
        with weft.init(heap_bytes=1 << 16) as world:
            return main(world)

    with weft.emulated(ranks=1, **options) as ranks:
        return ranks.run(with_world)[0]


def test_nothing_runs_while_recording_and_arguments_are_frozen():
    def main(world):
        x, out = torch.zeros(8), torch.zeros(8)
        with world.record() as recording:
            add_one[(1,)](x, out, BLOCK=8)
        assert out.tolist() == [0.0] * 8
        for value in (1.0, 5.0, 7.0):
            x.fill_(value)
            recording.replay()
            assert out.tolist() == [value + 1] * 8
        x, kept = torch.full((8,), 100.0), x
        recording.replay()
        return out[0].item(), kept[0].item()

    assert on_one_rank(main) == (8.0, 7.0)


def test_replays_queue_behind_each_other():
    def main(world):
        x = torch.zeros(8)
        with world.record() as recording:
            add_one[(1,)](x, x, BLOCK=8)
            add_one[(1,)](x, x, BLOCK=8)
        for _ in range(5):
            recording.replay()
        add_one[(1,)](x, x, BLOCK=8)
        return x.tolist()

    assert on_one_rank(main) == [11.0] * 8


def test_recordings_of_one_stream_need_no_other():
    def main(world):
        x, streams = torch.zeros(8), world.backend.machine.device.all_streams
        for _ in range(5):
            with world.record() as recording:
                add_one[(1,)](x, x, BLOCK=8)
            recording.replay()
        return x[0].item(), [name for _, name in streams]

    assert on_one_rank(main) == (5.0, ["main"])


def test_torch_operations_are_recorded():
    def main(world):
        x, total = torch.ones(8), torch.zeros(8)
        with world.record() as recording:
            y = x * 2
            z = torch.empty(8)
            add_one[(1,)](y, z, BLOCK=8)
            total.add_(z)
            low, high = torch.chunk(z, 2)
            w = torch.cat([high, low]) + torch.ones(8)
        assert total.tolist() == [0.0] * 8
        for i in range(3):
            x.fill_(i)
            recording.replay()
            assert z.tolist() == [2.0 * i + 1] * 8
            assert w.tolist() == [2.0 * i + 2] * 8
        return total.tolist()

    assert on_one_rank(main) == [9.0] * 8


def test_a_recording_with_two_streams():
    def main(world):
        x = world.zeros((8,), torch.float32)
        staged = world.zeros((8,), torch.float32)
        out = world.zeros((8,), torch.float32)
        copies = world.stream("copies")
        with world.record() as recording:
            add_one[(1,)](x, x, BLOCK=8)
            copies.wait(world.current_stream())
            with copies:
                world.copy(staged, x)
            world.current_stream().wait(copies)
            add_one[(1,)](staged, out, BLOCK=8)
        for _ in range(3):
            recording.replay()
        return out.tolist()

    for seed in range(5):
        assert on_one_rank(main, seed=seed) == [4.0] * 8


def test_a_recording_does_not_run_on_the_streams_of_one_that_is_gone():
    """A shared stream would order what nothing orders, and schedules would depend on addresses."""

    def main(world):
        x = world.zeros((8,), torch.float32)
        copies = world.stream("copies")
        for _ in range(4):
            with world.record() as recording:
                copies.wait(world.current_stream())
                with copies:
                    add_one[(1,)](x, x, BLOCK=8)
                world.current_stream().wait(copies)
            recording.replay()
            del recording
        return [one.name for one in world.backend.machine.device.streams(0) if "copies" in one.name]

    own = [f"copies of recording {number}" for number in range(1, 5)]
    assert on_one_rank(main) == ["copies", *own]


def test_the_same_seed_is_the_same_run_wherever_memory_lies():
    """Nothing that happens, in which order, or what it is called goes by an address."""

    def main(rank, noise):
        kept: list = [torch.empty(100 * i) for i in range(noise)]
        with weft.init(heap_bytes=1 << 16) as world:
            x, copies = world.zeros((8,), torch.float32), world.stream("copies")
            for _ in range(3):
                out = torch.zeros(8)
                with world.record() as recording:
                    copies.wait(world.current_stream())
                    with copies:
                        world.copy(world.peer(x, 1 - rank)[:4], out[:4])
                    add_one[(1,)](out, out, BLOCK=8)
                    world.current_stream().wait(copies)
                    world.barrier()
                recording.replay()
                kept += [recording] * (noise > 2)
                world.barrier()

    def events(noise):
        recorder = Recorder()
        with weft.emulated(ranks=2, seed=1, collect=True, observers=[recorder]) as ranks:
            ranks.run(main, noise)
        return [
            replace(one, word=one.word and one.word._replace(address=0)) for one in recorder.events
        ]

    assert events(0) == events(3) and len(events(0)) > 50


def test_eager_and_replayed_work_mix():
    def main(world):
        x = torch.zeros(8)
        with world.record() as recording:
            add_one[(1,)](x, x, BLOCK=8)
        add_one[(1,)](x, x, BLOCK=8)
        recording.replay()
        add_one[(1,)](x, x, BLOCK=8)
        with world.stream("other") as other:
            other.wait(world.stream("main"))
            recording.replay()
        world.stream("main").wait(other)
        return x.tolist()

    assert on_one_rank(main) == [4.0] * 8


def test_a_barrier_can_be_recorded():
    def main(rank):
        with weft.init(heap_bytes=1 << 16) as world:
            x = world.zeros((8,), torch.float32)
            out = torch.zeros(8)
            peer = world.peer(x, 1 - rank)
            with world.record() as recording:
                add_one[(1,)](x, x, BLOCK=8)
                world.barrier()
                world.copy(out, peer)
                world.barrier()
            for _ in range(3):
                recording.replay()
            return out.tolist()

    with weft.emulated(ranks=2) as ranks:
        assert ranks.run(main) == [[3.0] * 8] * 2


def test_a_missing_barrier_is_found_in_replays():
    def main(rank):
        with weft.init(heap_bytes=1 << 16) as world:
            x = world.zeros((8,), torch.float32)
            out = torch.zeros(8)
            peer = world.peer(x, 1 - rank)
            with world.record() as recording:
                add_one[(1,)](x, x, BLOCK=8)
                world.barrier()
                world.copy(out, peer)  # the peer's next replay may overwrite it meanwhile
            for _ in range(3):
                recording.replay()
            world.synchronize()

    with weft.emulated(ranks=2) as ranks, pytest.raises(weft.RaceError, match="x@rank"):
        ranks.run(main)


def test_what_cannot_be_recorded():
    def reads(world):
        x = torch.zeros(8)
        add_one[(1,)](x, x, BLOCK=8)
        with world.record():
            x.sum().item()

    def nests(world):
        with world.record(), world.record():
            pass

    def replays_early(world):
        with world.record() as recording:
            recording.replay()

    def leaves_a_branch(world):
        x = torch.zeros(8)
        side = world.stream("side")
        with world.record():
            side.wait(world.current_stream())
            with side:
                add_one[(1,)](x, x, BLOCK=8)

    def is_not_ordered(world):
        x = torch.zeros(8)
        with world.record(), world.stream("side"):
            add_one[(1,)](x, x, BLOCK=8)

    for main, error, words in (
        (reads, weft.UnsupportedError, "cannot read"),
        (nests, weft.UsageError, "nest"),
        (replays_early, weft.UsageError, "before the recording has ended|within"),
        (leaves_a_branch, weft.UsageError, "has not waited for"),
        (is_not_ordered, weft.UsageError, "not part of the recording"),
    ):
        with pytest.raises(error, match=words):
            on_one_rank(main)


def test_launches_of_a_call_that_comes_again_are_replayed_with_frozen_arguments():
    def main(world):
        calls, launched = world.replays(), []
        x, out = torch.zeros(8), torch.zeros(8)

        def call(number):
            calls.run("x", lambda: launched.append(number) or add_one[(1,)](x, out, BLOCK=8))

        for number in range(SIGHTINGS + 2):
            x.fill_(float(number))
            call(number)
            assert out.tolist() == [number + 1.0] * 8
        # The last one that launches is launched once more, to be recorded.
        assert launched == [*range(SIGHTINGS), SIGHTINGS - 1]
        x, kept = torch.full((8,), 100.0), x
        call(-1)  # a key without x
        return out[0].item(), kept[0].item()

    assert on_one_rank(main) == (SIGHTINGS + 2.0, SIGHTINGS + 1.0)


def test_a_replay_of_launches_takes_what_lies_at_its_addresses_and_keeps_nothing_alive():
    def main(world):
        calls, out = world.replays(), torch.zeros(8)
        x = torch.ones(8)

        def call():
            calls.run("x", lambda: add_one[(1,)](x, out, BLOCK=8))

        for _ in range(SIGHTINGS):
            call()
        world.synchronize()
        x = torch.ones(8)  # and what was there is gone
        call()

    with pytest.raises(OutOfBoundsError, match="belongs to no tensor|which has"):
        on_one_rank(main)
