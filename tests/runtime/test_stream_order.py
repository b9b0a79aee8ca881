"""Calls of one rank on several streams: who waits for whom, eager, recorded and replayed."""

from __future__ import annotations

import contextlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from fake_machine import run_ranks
from torchrun import on_two_and_four_gpus, once, torchrun

import weft
import weft.language as wl
from weft.ops import all_reduce
from weft.runtime.backends.cuda import CudaBackend
from weft.runtime.stream_order import StreamOrder

SCRIPT = Path(__file__).parent / "scripts" / "two_streams.py"
HEAP = 4 << 20


class Machine:
    """A backend of which a test says which stream is current, and which are being recorded."""

    def __init__(self):
        self.streams = {name: SimpleNamespace(name=name) for name in "ABC"}
        self.here, self.recorded = "A", ""
        self.waits: list[str] = []

    def stream_number(self):
        return ord(self.here)

    def current_stream(self):
        return self.streams[self.here]

    def is_recording(self):
        return self.here in self.recorded

    def wait_for(self, other):
        if (other.name in self.recorded) == self.is_recording():
            self.waits.append(f"{other.name}->{self.here}")


def waits_of(calls, recorded=""):
    """What waits for what when calls come on these streams."""
    machine = Machine()
    machine.recorded = recorded
    order = StreamOrder(machine)
    for machine.here in calls:
        order.take()
    return machine.waits


def test_a_call_waits_for_the_last_one_on_another_stream():
    assert waits_of("AAA") == []
    assert waits_of("AABBA") == ["A->B", "B->A"]
    assert waits_of("ABCA") == ["A->B", "B->C", "C->A"]


def test_what_is_recorded_waits_for_what_is_recorded_with_it():
    """B and C are of one recording, A is not; whichever stream it begins on."""
    assert waits_of("ABCBA", recorded="BC") == ["B->C", "C->B"]
    assert waits_of("BBCCB", recorded="BC") == ["B->C", "C->B"]
    machine = Machine()
    order = StreamOrder(machine)
    order.take()
    machine.recorded = "AB"  # the stream of the last eager call is the one that is captured
    for machine.here in "ABA":
        order.take()
    machine.recorded, machine.here = "", "C"
    order.take()
    assert machine.waits == ["A->B", "B->A", "A->C"]


def test_calls_on_one_stream_ask_for_its_number_alone(monkeypatch):
    machine = Machine()
    order = StreamOrder(machine)
    order.take()
    for name in ("current_stream", "is_recording", "wait_for"):
        monkeypatch.setattr(machine, name, lambda *_: pytest.fail("asked for more"))
    order.take()


def test_streams_of_two_kinds_are_not_ordered_on_gpus(monkeypatch):
    """A captured stream that waits for one outside of its capture ends the capture; the other way
    round it would take that stream in."""
    queued: list[str] = []

    class Stream:
        def __init__(self, name, captured):
            self.name, self.captured = name, captured

        def __enter__(self):
            self.outside, now[0] = now[0], self

        def __exit__(self, *_):
            now[0] = self.outside

        def wait(self, other):
            queued.append(f"{other.name}->{self.name}")

    eager, captured = Stream("eager", False), Stream("captured", True)
    others = Stream("eager too", False), Stream("captured too", True)
    backend = CudaBackend.__new__(CudaBackend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0].captured)
    monkeypatch.setattr(backend, "current_stream", lambda: now[0])
    for here in (eager, captured):
        now = [here]
        for other in (*others, captured if here is eager else eager):
            backend.wait_for(other)
            assert now == [here]
    assert queued == ["eager too->eager", "captured too->captured"]


def test_memory_that_calls_share_comes_after_them_on_other_streams():
    """An operator's call takes its slot without an order of the slot's own."""

    def main(world):
        machine = Machine()
        order = world._call_order
        order._backend, order._current_number = machine, machine.stream_number
        world.operator_call("gemm_rs")
        machine.here = "B"
        world.workspace("mine", shared={"rows": ((4,), torch.float32)})
        return machine.waits

    assert run_ranks(main, 1) == [["A->B"]]


def in_turn(kind, *, turns=5):
    """Calls on two streams of each rank, which the script orders at the beginning alone."""

    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        x, found = torch.full((64,), 1.0 + rank), []
        first, second = world.current_stream(), world.stream("second")
        own = world.signals(1, torch.int64)
        second.wait(first)
        for turn in range(turns):
            with second if turn % 2 else contextlib.nullcontext():
                if kind == "operator":
                    found.append(all_reduce(x, world=world))
                elif kind == "barrier":
                    world.barrier()
                else:
                    slot = world.workspace("mine", {}, {"count": (1, torch.int64)}, num_slots=1)
                    count_up[(1,)](slot.count)
        world.synchronize()
        assert all(out.eq(3).all() for out in found)
        if kind == "workspace":
            assert slot.count.item() == turns
        return own

    return main


@triton.jit
def count_up(word):
    tl.store(word, tl.load(word) + 1)


@pytest.mark.parametrize("kind", ["operator", "barrier", "workspace"])
def test_two_streams_in_turn(ranks, kind, monkeypatch):
    for seed in range(3):
        assert ranks(in_turn(kind), 2, seed=seed, collect=True).ok
    monkeypatch.setattr(StreamOrder, "take", lambda order: None)
    report = ranks(in_turn(kind), 2, collect=True)
    assert "race" in {finding.kind for finding in report.findings}


@triton.jit
def swap_packets(world, words, flag):
    """A packet to the other rank, and the other's, in one of two words by turns."""
    word = words + flag % 2
    wl.put_packets(world, word, flag, flag, to=1 - wl.rank(world))
    wl.wait_packets(word, flag, world=world)


@pytest.mark.parametrize("by", ["event", "host", "nothing"])
def test_packets_that_were_read_on_another_stream_may_be_overwritten(ranks, by):
    """What puts one stream's work before another's puts its reads of packets there too."""

    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        words = world.signals(2, torch.int64)
        streams = [world.stream(name) for name in ("first", "second")]
        for turn in range(4):
            now, other = streams[turn % 2], streams[1 - turn % 2]
            if by == "event":
                now.wait(other)
            elif by == "host":
                world.synchronize()
            with now:
                swap_packets[(1,)](world.arg, words, turn + 1, num_warps=1)
        world.synchronize()

    report = ranks(main, 2, collect=True)
    assert report.ok == (by != "nothing"), report


def test_a_replay_comes_after_calls_on_other_streams_and_before_later_ones(ranks, monkeypatch):
    """Also of a world that has calls in another world's recording."""

    def main(rank):
        worlds = [weft.init(heap_bytes=HEAP), weft.init(heap_bytes=HEAP)]
        x = torch.full((64,), 1.0 + rank)
        outs, side = [torch.empty(64) for _ in worlds], worlds[0].stream("side")
        for world in worlds:
            all_reduce(x, world=world)
        side.wait(worlds[0].current_stream())
        with worlds[0].record() as recording:
            for world, out in zip(worlds, outs, strict=True):
                all_reduce(x, world=world, out=out)
        with side:
            before = [all_reduce(x, world=world) for world in worlds]
        recording.replay()
        with side:
            after = [all_reduce(x, world=world) for world in worlds]
        for world in worlds:
            world.synchronize()
        assert all(out.eq(3).all() for out in (*before, *outs, *after))

    for seed in range(3):
        assert ranks(main, 2, seed=seed, collect=True).ok
    monkeypatch.setattr("weft.runtime.stream_order.OrderedRecording.end", lambda *_: None)
    assert not ranks(main, 2, collect=True).ok


SAID = r"rank (\d) of \d: (\d+) right"


def test_operators_on_two_streams_emulated(ranks, capfd, monkeypatch):
    monkeypatch.setenv("TURNS", "4")
    ranks(lambda: runpy.run_path(str(SCRIPT), run_name="__main__") and None, 2)
    said = capfd.readouterr().out.split("\n")
    assert sorted(once(said[:2], SAID)) == [("0", "36"), ("1", "36")]


@on_two_and_four_gpus
def test_operators_on_two_streams_under_torchrun(ranks):
    said = once(torchrun(SCRIPT, ranks), SAID)
    assert said == [(str(rank), "360") for rank in range(ranks)]
