"""Simulated time: what serialises, what overlaps, who waits for whom, and that it is repeatable."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.base.hardware import HARDWARE, find_hardware
from weft.base.schedule import KINDS, Span
from weft.emulator.simulated_time import Calendar, WordTimes
from weft.ops import cards
from weft.tools.main import main as weft_cli

H200 = HARDWARE["h200x4"]
HEAP = 1 << 22
KIB = 1 << 10


def copies(session, rank: int = 0) -> list[Span]:
    """The data copies of a rank; signals are spans of their own."""
    return [span for span in session.timeline.on(rank, "copy engine") if "bytes" in span.name]


# ---------------------------------------------------------------------------------------------
# Engines and links


def test_a_calendar_gives_the_first_gap_that_is_long_enough():
    calendar = Calendar()
    for start, end in ((0.0, 10.0), (20.0, 30.0), (12.0, 15.0), (10.0, 12.0)):
        calendar.take(start, end)
    assert (calendar.starts, calendar.ends) == ([0.0, 20.0], [15.0, 30.0])
    assert calendar.earliest(0.0, 5.0) == 15.0
    assert calendar.earliest(0.0, 6.0) == 30.0
    assert calendar.earliest(22.0, 0.0) == 22.0
    calendar.take(15.0, 20.0)
    assert (calendar.starts, calendar.ends) == ([0.0], [30.0])


@pytest.mark.parametrize("seed", range(5))
def test_calendars_never_give_a_time_twice(seed):
    random = np.random.default_rng(seed)
    calendar, taken = Calendar(), []
    for _ in range(200):
        ready, duration = random.uniform(0, 50), random.uniform(0.1, 3)
        start = calendar.earliest(ready, duration)
        assert start >= ready
        calendar.take(start, start + duration)
        taken.append((start, start + duration))
    taken.sort()
    assert all(a[1] <= b[0] + 1e-9 for a, b in zip(taken, taken[1:], strict=False))


@pytest.mark.parametrize("engines, overlap", [(1, False), (2, True)])
def test_copies_on_one_engine_serialise_and_on_two_overlap(engines, overlap):
    def main():
        world = weft.init(heap_bytes=HEAP)
        a, b = (torch.zeros(64 * KIB) for _ in range(2))
        for name, source in (("one", a), ("two", b)):
            with world.stream(name):
                world.copy(torch.empty(64 * KIB), source)
        world.synchronize()

    with weft.emulated(ranks=1, hardware=replace(H200, copies=engines)) as session:
        session.run(main)
        first, second = copies(session)
    assert (second.start_us < first.end_us) is overlap
    assert {first.lane, second.lane} == {f"copy engine {i}" for i in range(engines)}


def test_copies_in_one_direction_share_the_link_and_in_two_do_not():
    """As on the machine that was measured: more copy streams move no more from a peer."""

    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        x, y = world.zeros((256 * KIB,), torch.float32), world.zeros((256 * KIB,), torch.float32)
        world.barrier()
        world.synchronize()
        if rank == 0:
            mine = [torch.zeros(256 * KIB) for _ in range(3)]
            pairs = [(mine[0], world.peer(x, 1)), (mine[1], world.peer(y, 1))]
            if opposite:
                pairs[1] = (world.peer(y, 1), mine[1])
            for number, (dst, src) in enumerate(pairs):
                with world.stream(str(number)):
                    world.copy(dst, src)
        world.barrier()

    for opposite in (False, True):
        with weft.emulated(ranks=2, hardware="h200x4") as session:
            session.run(main)
            first, second = copies(session)
        moving = first.end_us - H200.copy_us - first.start_us
        assert moving == pytest.approx(2**20 / (H200.copy_gbps * 1e3))
        overlap = first.end_us - second.start_us - H200.copy_us
        assert overlap == pytest.approx(moving if opposite else 0.0)


@pytest.mark.parametrize("targets", [(0, 0), (0, 3)], ids=["one receiver", "two receivers"])
def test_who_receives_from_two_ranks_has_one_link(targets):
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        x = world.zeros((2, 256 * KIB), torch.float32)
        world.barrier()
        world.synchronize()
        if rank in (1, 2):
            world.copy(world.peer(x, targets[rank - 1])[rank - 1], torch.zeros(256 * KIB))
        world.barrier()

    with weft.emulated(ranks=4, hardware="h200x4") as session:
        session.run(main)
        spans = [copies(session, rank)[0] for rank in (1, 2)]
    first, second = sorted(spans, key=lambda span: span.start_us)
    moving = 2**20 / (H200.copy_gbps * 1e3)
    overlap = first.end_us - second.start_us - H200.copy_us
    assert (overlap > 0.9 * moving) is (targets[0] != targets[1])


def test_a_stream_waits_for_another_one_and_time_does_too():
    def main():
        world = weft.init(heap_bytes=HEAP)
        a = torch.zeros(64 * KIB)
        with world.stream("first") as first:
            world.copy(torch.empty(64 * KIB), a)
        with world.stream("second") as second:
            second.wait(first)
            world.copy(torch.empty(64 * KIB), a)
        world.synchronize()

    with weft.emulated(ranks=1, hardware="h200x4") as session:
        session.run(main)
        first, second = copies(session)
        (told,) = session.timeline.signals
        (waited,) = [s for s in session.timeline.on(0, "stream") if s.kind == "wait"]
    assert second.start_us >= first.end_us
    assert (told.source_lane, told.lane) == ("stream first", "stream second")
    assert (waited.name, waited.end_us) == ("wait for stream first", told.arrived_us)


# ---------------------------------------------------------------------------------------------
# Programs


@triton.jit
def produce_parts(world, x, rows, tokens, size: tl.constexpr):
    """Two parts, one after the other, each with its token."""
    i = tl.arange(0, size)
    for part in range(2):
        offset = part * size * size + i[:, None] * size + i[None, :]
        tile = tl.load(x + offset)
        tl.store(rows + offset, tl.dot(tile, tile))
        wl.notify(world, tokens + part, 1, to=wl.rank(world), op="set")


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_goes_on_when_its_token_was_set(seed):
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        tokens, inbox = world.signals(2, torch.int64), world.empty((2, 64, 64), torch.float32)
        x, rows = torch.ones(2, 64, 64).half(), torch.empty(2, 64, 64)
        copies = world.stream("copies")
        for _ in range(2):  # the second time, what the first one left is there
            copies.wait(world.current_stream())
            produce_parts[(1,)](world.arg, x, rows, tokens, 64)
            with copies:
                for part in range(2):
                    world.take_token(tokens[part : part + 1])
                    world.copy(world.peer(inbox, 1 - rank)[part], rows[part])
            world.current_stream().wait(copies)
            world.barrier()

    slow = replace(H200, program_tflops=1 / 132)
    with weft.emulated(ranks=2, seed=seed, hardware=slow) as session:
        session.run(main)
        timeline = session.timeline
    told = [signal for signal in timeline.signals if signal.name.startswith("tokens[")]
    for rank in range(2):
        moved = copies(session, rank)
        mine = sorted((one for one in told if one.rank == rank), key=lambda one: one.arrived_us)
        waits = [s for s in timeline.on(rank, "stream copies") if s.name.startswith("wait tokens")]
        assert [one.name for one in mine] == ["tokens[0]", "tokens[1]"] * 2
        assert [s.end_us for s in sorted(waits, key=lambda s: s.end_us)] == [
            one.arrived_us for one in mine
        ]
        for one, copied in zip(mine, sorted(moved, key=lambda s: s.start_us), strict=True):
            assert one.source_lane.startswith("sm") and one.lane == "stream copies"
            # The first part is on its way while the second is multiplied.
            assert (
                one.arrived_us >= one.sent_us + slow.token_us and copied.start_us >= one.arrived_us
            )
        assert mine[0].arrived_us == pytest.approx(mine[0].sent_us + slow.token_us)
        assert moved and min(s.start_us for s in moved) < mine[1].sent_us


@triton.jit
def multiply_chunk(world, a, ready, out, epoch, size: tl.constexpr):
    """A product of a chunk that a copy engine brings."""
    i = tl.arange(0, size)
    wl.wait(ready, at_least=epoch, world=world)
    tile = tl.load(a + i[:, None] * size + i[None, :])
    tl.store(out + i[:, None] * size + i[None, :], tl.dot(tile, tile))


def test_a_product_starts_when_its_chunk_has_arrived():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        x = world.zeros((64, 64), torch.float16)
        ready = world.signals(1, torch.int64)
        here, one = torch.zeros(64, 64).half(), world.signals(1, torch.int64)
        x.fill_(1.0)
        one.fill_(1)
        world.barrier()
        with world.stream("copy") as copy:
            copy.wait(world.stream("main"))
            world.copy(here, world.peer(x, 1 - rank))
            world.copy_word(ready, world.peer(one, 1 - rank))
        out = torch.zeros(64, 64)
        multiply_chunk[(1,)](world.arg, here, ready, out, 1, 64)
        assert (out == 64.0).all()
        world.barrier()

    with weft.emulated(ranks=2, seed=3, hardware="h200x4") as session:
        session.run(main)
        timeline = session.timeline
    for rank in range(2):
        (copied,) = copies(session, rank)
        (program,) = [s for s in timeline.on(rank, "sm") if s.name.startswith("multiply_chunk")]
        (waited,) = [s for s in timeline.on(rank, "sm") if s.name.startswith("wait ready")]
        assert program.start_us < copied.end_us, "the program is there before its chunk"
        assert waited.end_us == pytest.approx(copied.end_us, abs=1e-3)
        assert program.end_us > waited.end_us
        (told,) = [s for s in timeline.signals if (s.rank, s.name) == (rank, "ready[0]")]
        assert (told.source_rank, told.lane) == (rank, program.lane)
        assert told.source_lane == "copy engine 0" and told.arrived_us == waited.end_us
        assert told in timeline.held_up()
        (multiplied,) = [s for s in timeline.on(rank, "sm") if "524288 flops" in s.name]
        assert (multiplied.kind, multiplied.start_us) == ("work", waited.end_us)
        kernels = {s.name: s for s in timeline.on(rank, "stream main") if s.kind == "kernel"}
        assert kernels["multiply_chunk"].end_us >= program.end_us


@triton.jit
def spend(x, out, size: tl.constexpr):
    i = tl.arange(0, size)
    offset = tl.program_id(0) * size * size + i[:, None] * size + i[None, :]
    tile = tl.load(x + offset)
    tl.store(out + offset, tl.dot(tile, tile))


@pytest.mark.parametrize("num_sms, rounds", [(4, 1), (2, 2), (1, 4)])
def test_programs_wait_for_a_place(num_sms, rounds):
    def main():
        x, out = torch.ones(4, 16, 16).half(), torch.empty(4, 16, 16)
        spend[(4,)](x, out, 16)
        assert (out == 16.0).all()

    slow = replace(H200, program_tflops=1 / 132)
    with weft.emulated(ranks=1, num_sms=num_sms, hardware=slow) as session:
        session.run(main)
        programs = session.timeline.on(0, "sm")
    flops, per_us = 2 * 16**3, 1e6 / H200.num_sms
    assert len({program.lane for program in programs}) == num_sms
    length = max(p.end_us for p in programs) - programs[0].start_us
    assert length == pytest.approx(rounds * flops / per_us)
    assert programs[0].start_us == H200.launch_us


@triton.jit
def send(world, inbox, arrived, n: tl.constexpr):
    i = tl.arange(0, n)
    peer = world.num_ranks - 1 - wl.rank(world)
    wl.put(world, inbox + i, tl.full((n,), 1.0, tl.float32), to=peer)
    wl.notify(world, arrived, to=peer)
    wl.wait(arrived, at_least=1, world=world)


@pytest.mark.parametrize("nodes, latency_us, gbps", [
    (1, H200.signal_us, H200.pusher_gbps), (2, H200.far_us, H200.pusher_gbps),
])  # fmt: skip
def test_another_node_is_farther(nodes, latency_us, gbps):
    def main():
        world = weft.init(heap_bytes=HEAP)
        inbox, arrived = world.zeros((256,), torch.float32), world.signals(1)
        world.barrier()
        send[(1,)](world.arg, inbox, arrived, 256)

    with weft.emulated(ranks=2, nodes=nodes, hardware="h200x4") as session:
        session.run(main)
        programs = [s for s in session.timeline if s.name.startswith("send[")]
    first, second = programs
    sent = 1024 / (gbps * 1e3)
    later = max(first.start_us, second.start_us)
    assert max(p.end_us for p in programs) == pytest.approx(later + sent + latency_us)


def test_a_counting_signal_is_full_when_the_arrivals_say_so():
    """Not when the schedule happened to count."""
    word, kind = WordTimes(), np.dtype(np.int32)
    for old, arrival in enumerate((9.0, 1.0, 5.0)):
        word.changed(np.int32(old), np.int32(old + 1), arrival, False)
    assert [word.reached(n, kind)[0] for n in (0, 1, 2, 3)] == [0.0, 1.0, 5.0, 9.0]
    assert (word.showed(2), word.latest()) == (1.0, 9.0)
    word.changed(np.int32(0), np.int32(7), 20.0, True)  # zeroed by the host in between
    assert word.reached(7, kind) == (20.0, None) and word.showed(3) == 0.0


@triton.jit
def add_up(total, values, n: tl.constexpr):
    i = tl.program_id(0)
    tl.atomic_add(total, tl.load(values + i))
    tl.atomic_max(total + 1 + tl.arange(0, n), tl.load(values + tl.arange(0, n)))


@pytest.mark.parametrize("checks", [True, False])
def test_atomics_on_floats_and_tiles(checks):
    def main():
        total, values = torch.zeros(5), torch.tensor([0.5, float("nan"), 1.5, 2.5])
        add_up[(4,)](total, values, 4)
        return total.tolist()

    with weft.emulated(ranks=1, checks=checks, hardware="h200x4") as session:
        session.run(main)
        assert len([s for s in session.timeline.on(0, "sm") if s.kind == "program"]) == 4


def test_a_torch_product_costs_its_flops():
    def main():
        world = weft.init(heap_bytes=HEAP)
        a = world.zeros((256, 256), torch.float16)
        torch.mm(a, a)
        world.synchronize()

    with weft.emulated(ranks=1, hardware=replace(H200, program_tflops=1 / 132)) as session:
        session.run(main)
        (product,) = [s for s in session.timeline.on(0, "torch") if s.name == "mm"]
    assert product.end_us - product.start_us == pytest.approx(2 * 256**3 / 1e6)


# ---------------------------------------------------------------------------------------------
# The whole


# Products and transfers of these sizes take about as long as each other.
EVEN = replace(
    H200, num_sms=9, program_tflops=0.8 / 9, copy_gbps=4.0, launch_us=0.5, copy_us=0.5, copies=1
)
M, N, K = 512, 128, 128


def fused(seed: int = 0):
    op = cards()["ag_gemm"]
    problem = op.make_problem(4, {"m": M, "n": N, "k": K}, "float16")
    config = op.config(
        transport="ce_push", chunks=1, tile_m=32, tile_n=32, tile_k=32, num_warps=4, pushers=2,
        tma=False,
    )  # fmt: skip
    inputs = [op.make_inputs(problem, rank, 0) for rank in range(4)]

    def main(rank):
        world = weft.init()
        op.run(world, problem, inputs[rank], config)
        world.synchronize()

    with weft.emulated(ranks=4, seed=seed, num_sms=9, hardware=EVEN) as session:
        session.run(main)
    return session.timeline


def serial():
    def main(rank):
        world = weft.init()
        shard = world.zeros((M // 4, K), torch.float16)
        gathered, b = torch.zeros(4, M // 4, K).half(), torch.zeros(K, N).half()
        world.barrier()
        for step in range(4):
            source = (rank + step) % 4
            world.copy(gathered[source], world.peer(shard, source))
        torch.mm(gathered.view(M, K), b)
        world.barrier()
        world.synchronize()

    with weft.emulated(ranks=4, num_sms=9, hardware=EVEN) as session:
        session.run(main)
    return session.timeline


def test_the_fused_operator_overlaps_what_the_serial_one_does_not():
    together, one_by_one = fused(), serial()
    assert all(line.overlap > 0.5 for line in together.summary()), together.summary()
    assert all(line.overlap < 0.1 for line in one_by_one.summary()), one_by_one.summary()
    assert together.makespan_us < 0.85 * one_by_one.makespan_us


def test_a_seed_gives_the_same_times_and_another_one_nearly():
    first, second, other = fused(0), fused(0), fused(1)
    assert list(first) == list(second)
    assert first.summary() == second.summary()
    makespans = [one.makespan_us for one in (first, other)]
    assert max(makespans) < 1.1 * min(makespans), makespans


def test_recorded_work_has_its_time_at_each_replay():
    def main():
        world = weft.init(heap_bytes=HEAP)
        a, b = world.zeros((4096,), torch.float32), torch.empty(4096)
        with world.record() as recording:
            world.copy(b, a)
            a.add_(1.0)
        for _ in range(3):
            recording.replay()
        world.synchronize()

    with weft.emulated(ranks=1, hardware="h200x4") as session:
        session.run(main)
        assert len(copies(session)) == 3
        adds = [span for span in session.timeline.on(0, "torch") if span.name == "add_"]
    assert len(adds) == 3 and adds[0].end_us <= adds[1].start_us


def test_the_trace_is_what_perfetto_reads(tmp_path):
    timeline = fused()
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == len(timeline)
    assert {event["pid"] for event in work} == {0, 1, 2, 3}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in work)
    assert {event["cat"] for event in work} <= set(KINDS)
    flows = [event for event in events if event["ph"] in "sf"]
    assert len(flows) == 2 * len(timeline.held_up()) > 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in work} <= named


SCRIPT = """
import torch, weft
world = weft.init()
x = world.zeros((1024,), torch.float32)
world.barrier()
world.copy(torch.empty(1024), world.peer(x, (world.rank + 1) % world.num_ranks))
world.synchronize()
"""


def test_the_command_line_writes_it(tmp_path, capsys):
    script, trace = tmp_path / "neighbour.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    assert weft_cli(["emulate", str(script), "--ranks", "3", "--timeline", str(trace)]) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()] == ["rank 0", "rank 1", "rank 2"]
    assert "would overlap" in said
    assert json.loads(trace.read_text())["traceEvents"]
    assert weft_cli(["emulate", str(script), "--json", "--timeline", str(trace)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [line["rank"] for line in values["timeline"]] == [0, 1, 2, 3]
    drawn = tmp_path / "trace.html"
    assert weft_cli(["emulate", str(script), "--ranks", "2", "--timeline", str(drawn)]) == 0
    assert "copy engine 0" in drawn.read_text() and "in a browser" in capsys.readouterr().err
    assert weft_cli(["emulate", str(script), "--timeline", str(tmp_path / "no" / "t.json")]) == 2
    assert weft_cli(["emulate", str(script), "--timeline", str(trace), "--hw", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err


def test_off_unless_asked_for():
    with weft.emulated(ranks=1) as session:
        session.run(lambda: None)
        with pytest.raises(weft.UsageError, match="hardware"):
            _ = session.timeline


def test_hardware_that_cannot_be():
    with pytest.raises(weft.UsageError, match="abacus"):
        find_hardware("abacus")
    with pytest.raises(weft.UsageError, match="copy_gbps"):
        replace(H200, copy_gbps=0.0)
    with pytest.raises(weft.UsageError, match="signal_us"):
        replace(H200, signal_us=-1.0)
    assert replace(H200, signal_us=0.0).signal_us == 0.0
