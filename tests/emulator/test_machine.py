"""The machine alone: kernels written by hand as the front end would generate them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from weft.base.errors import DeadlockError, RaceError, ResidencyError, UninitializedError
from weft.base.place import Frame, Place
from weft.emulator.device import HeapView
from weft.emulator.machine import Machine
from weft.emulator.works import CopyWork, Event, EventRecord, EventWait, KernelWork, WordCopyWork

F32, I32, I64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


@dataclass(eq=False)
class FakeKernel:
    name: str
    function: object
    parameters: tuple = ()
    source: str = ""
    num_threads: int = 128
    locations: list = field(
        default_factory=lambda: [Place((Frame("user.py", line, "k"),)) for line in range(100)]
    )


class Bench:
    """Two ranks with one symmetric float array `x` and four signal words `flags` each."""

    def __init__(self, ranks: int = 2, **options) -> None:
        self.machine = Machine(ranks, **options)
        self.arrays = [np.zeros(64 * 4 + 64 * 8, np.uint8) for _ in range(ranks)]
        bases = tuple(int(a.ctypes.data) for a in self.arrays)
        for rank, base in enumerate(bases):
            register = self.machine.memory.register
            register(base, 256, 4, rank, "x", heap_offset=0, initialised=False)
            register(base + 256, 512, 8, rank, "flags", heap_offset=256)
            view = HeapView(rank, bases, (True,) * ranks, 768)
            self.machine.device.heaps[rank] = view
        self.x = bases
        self.flags = tuple(base + 256 for base in bases)

    def kernel(self, rank, function, *args, grid=1, stream="main", cooperative=False):
        work = KernelWork(
            FakeKernel(function.__name__, function), (grid, 1, 1), args, cooperative=cooperative
        )
        self.machine.device.stream(rank, stream).enqueue(work)

    def run(self, *mains):
        for rank, main in enumerate(mains):
            self.machine.hosts.add(rank, main)
        return self.machine.run()


LANES = np.arange(16) * 4


def produce(rt, x, flag, signal):
    rt.store(x + LANES, np.arange(16, dtype=F32), None, F32, (16,), 10)
    if signal:
        rt.extern("weft.notify:set.release.sys", [flag, np.int64(1)], I32, (), 11)


def consume(rt, x, flag, wait, out):
    if wait:
        rt.extern("weft.wait:acquire.sys", [flag, np.int64(1), np.int32(1)], I32, (), 20)
    out.append(rt.load(x + LANES, None, None, F32, (16,), 21))


@pytest.mark.parametrize("seed", range(8))
def test_signal_orders(seed):
    bench, out = Bench(seed=seed), []
    report = bench.run(
        lambda: bench.kernel(0, produce, bench.x[1], bench.flags[1], True),
        lambda: bench.kernel(1, consume, bench.x[1], bench.flags[1], True, out),
    )
    assert report.ok, report
    assert out[0].tolist() == list(range(16))


@pytest.mark.parametrize(
    "scope, order", [("gpu", "release"), ("sys", "relaxed"), ("cta", "release")]
)
def test_weak_signal_races(scope, order):
    def weak(rt, x, flag):
        rt.store(x + LANES, np.zeros(16, F32), None, F32, (16,), 10)
        rt.extern(f"weft.notify:set.{order}.{scope}", [flag, np.int64(1)], I32, (), 11)

    bench, out = Bench(), []
    report = bench.run(
        lambda: bench.kernel(0, weak, bench.x[1], bench.flags[1]),
        lambda: bench.kernel(1, consume, bench.x[1], bench.flags[1], True, out),
    )
    assert report.races
    lines = {(f.first.line, f.second.line) for f in report.races}
    assert (21, 10) in lines


def produce_twice(rt, x, flag, late):
    """Two signals, of which the second announces x; and a word that says that both are there."""
    rt.extern("weft.notify:add.release.sys", [flag, np.int64(1)], I32, (), 9)
    produce(rt, x, flag, False)
    rt.extern("weft.notify:add.release.sys", [flag, np.int64(1)], I32, (), 11)
    rt.extern("weft.notify:set.relaxed.sys", [late, np.int64(1)], I32, (), 12)


def consume_late(rt, x, flag, late, at_least, first, out):
    """Waits for so much, once both signals are there; `first`: has waited for as much before."""
    rt.extern("weft.wait:relaxed.sys", [late, np.int64(1), np.int32(1)], I32, (), 18)
    if first:
        rt.extern("weft.wait:relaxed.sys", [flag, np.int64(first), np.int32(1)], I32, (), 19)
    wait = [flag, np.int64(at_least), np.int32(1)]
    rt.extern("weft.wait:acquire.sys", wait, I32, (), 20)
    out.append(rt.load(x + LANES, None, None, F32, (16,), 21))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("at_least", "first", "is_right"), [(2, 0, True), (1, 0, False), (0, 0, False), (1, 2, True)]
)
def test_a_wait_learns_no_more_than_it_waits_for(seed, at_least, first, is_right):
    """Whatever the word holds by then; but nobody sees an older value than the one seen before."""
    bench, out = Bench(seed=seed), []
    x, flag = bench.x[1], bench.flags[1]
    report = bench.run(
        lambda: bench.kernel(0, produce_twice, x, flag, flag + 8),
        lambda: bench.kernel(1, consume_late, x, flag, flag + 8, at_least, first, out),
    )
    assert bool(report.races) is not is_right, report


def test_missing_wait_is_found_on_every_schedule():
    found = 0
    for seed in range(6):
        bench, out = Bench(seed=seed), []
        report = bench.run(
            lambda: bench.kernel(0, produce, bench.x[1], bench.flags[1], True),
            lambda: bench.kernel(1, consume, bench.x[1], bench.flags[1], False, out),
        )
        found += not report.ok
        kinds = {f.kind for f in report.findings}
        assert kinds <= {"race", "uninitialised", "unused signal"}
    assert found == 6


def test_missing_signal_is_a_deadlock_with_its_words():
    bench, out = Bench(), []
    report = bench.run(
        lambda: bench.kernel(0, produce, bench.x[1], bench.flags[1], False),
        lambda: bench.kernel(1, consume, bench.x[1], bench.flags[1], True, out),
    )
    (finding,) = report.deadlocks
    assert finding.first.line == 20 and finding.first.rank == 1
    assert "flags@rank1[0] >= 1, which is 0" in finding.message
    assert isinstance(bench.machine.error, DeadlockError)


def test_raw_spin_is_a_wait():
    def spin(rt, x, flag, out):
        while rt.atomic_rmw("add", "acquire", "sys", flag, I64.type(0), None, I64, (), 30) < 1:
            pass
        out.append(rt.load(x + LANES, None, None, F32, (16,), 31))

    for seed in range(5):
        bench, out = Bench(seed=seed), []
        report = bench.run(
            lambda: bench.kernel(0, produce, bench.x[1], bench.flags[1], True),
            lambda: bench.kernel(1, spin, bench.x[1], bench.flags[1], out),
        )
        assert report.ok, report
        bench, out = Bench(seed=seed), []
        report = bench.run(
            lambda: bench.kernel(0, produce, bench.x[1], bench.flags[1], False),
            lambda: bench.kernel(1, spin, bench.x[1], bench.flags[1], out),
        )
        assert report.deadlocks[0].first.line == 30


def test_streams_order_and_events_order_streams():
    def go(with_event):
        bench, out = Bench(ranks=1), []

        def main():
            bench.kernel(0, produce, bench.x[0], bench.flags[0], False)
            if with_event:
                event = Event()
                bench.machine.device.stream(0).enqueue(EventRecord(event))
                bench.machine.device.stream(0, "side").enqueue(EventWait(event))
            bench.kernel(0, consume, bench.x[0], 0, False, out, stream="side")

        return bench.run(main)

    assert go(True).ok
    assert not go(False).ok


def test_copy_engine_signals_behind_its_data():
    def go(word_first):
        bench, out = Bench(), []
        span = lambda base: (base, (16,), (4,), F32)  # noqa: E731

        def main0():
            bench.kernel(0, produce, bench.x[0], bench.flags[0], True)
            stream = bench.machine.device.stream(0)
            works = [
                CopyWork(span(bench.x[1]), span(bench.x[0])),
                WordCopyWork(bench.flags[1], bench.flags[0]),
            ]
            for work in reversed(works) if word_first else works:
                stream.enqueue(work)

        return bench.run(
            main0, lambda: bench.kernel(1, consume, bench.x[1], bench.flags[1], True, out)
        )

    assert go(False).ok
    assert not go(True).ok


def test_grid_that_cannot_be_resident():
    def pair(rt, flags):
        me = int(rt.pid[0])
        if me == 3:
            rt.extern("weft.notify:set.release.gpu", [flags, np.int64(1)], I32, (), 40)
        else:
            rt.extern("weft.wait:acquire.gpu", [flags, np.int64(1), np.int32(1)], I32, (), 41)

    bench = Bench(ranks=1, num_sms=2)
    report = bench.run(lambda: bench.kernel(0, pair, bench.flags[0], grid=4))
    assert report.findings[0].kind == "residency"
    assert isinstance(bench.machine.error, ResidencyError)
    bench = Bench(ranks=1, num_sms=4)
    assert bench.run(lambda: bench.kernel(0, pair, bench.flags[0], grid=4)).ok
    bench = Bench(ranks=1, num_sms=2)
    bench.run(lambda: bench.kernel(0, pair, bench.flags[0], grid=4, cooperative=True))
    assert isinstance(bench.machine.error, ResidencyError)


def test_uninitialised_and_out_of_bounds():
    bench, out = Bench(ranks=1), []
    report = bench.run(lambda: bench.kernel(0, consume, bench.x[0], 0, False, out))
    assert report.findings[0].kind == "uninitialised"
    assert isinstance(bench.machine.error, UninitializedError)

    def beyond(rt, flags):
        rt.store(flags + 480 + np.arange(8) * 8, np.arange(8), None, I64, (8,), 50)

    bench = Bench(ranks=1)
    report = bench.run(lambda: bench.kernel(0, beyond, bench.flags[0]))
    assert report.findings[0].kind == "out of bounds"
    assert "element 64 of flags@rank0" in report.findings[0].message


def test_scope_of_atomics_across_ranks():
    def add(rt, flags, scope):
        rt.atomic_rmw("add", "relaxed", scope, flags, I64.type(1), None, I64, (), 60)

    for scope, races in (("sys", 0), ("gpu", 1)):
        bench = Bench()
        report = bench.run(
            *(lambda r=r: bench.kernel(r, add, bench.flags[0], scope) for r in range(2))
        )
        assert len(report.races) == races


def test_descriptor_store_is_asynchronous_until_completed():
    def tma(rt, x, flag, primitive):
        desc = rt.make_descriptor(x, [4, 4], [4, 1], [4, 4], F32, "zero", 0)
        rt.descriptor_store(desc, [0, 0], np.ones((4, 4), F32), 70)
        if primitive:
            rt.extern("weft.notify:set.release.sys", [flag, np.int64(1)], I32, (), 71)
        else:
            rt.atomic_rmw("exch", "release", "sys", flag, I64.type(1), None, I64, (), 72)

    from weft.emulator.accesses import RELEASE_COMPLETES_STORES

    for primitive in (True, False):
        bench, out = Bench(), []
        report = bench.run(
            lambda: bench.kernel(0, tma, bench.x[1], bench.flags[1], primitive),
            lambda: bench.kernel(1, consume, bench.x[1], bench.flags[1], True, out),
        )
        assert report.ok == (primitive or RELEASE_COMPLETES_STORES)


def test_same_seed_same_schedule():
    def order(seed):
        bench, trace = Bench(seed=seed), []

        def step(rt, flags):
            for _ in range(3):
                rt.atomic_rmw("add", "relaxed", "sys", flags, I64.type(1), None, I64, (), 80)
                trace.append((rt.rank, int(rt.pid[0])))

        bench.run(*(lambda r=r: bench.kernel(r, step, bench.flags[0], grid=3) for r in range(2)))
        return trace

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


def test_race_between_hosts_errors_are_findings():
    bench, _out = Bench(seed=1), []
    bench.run(
        lambda: bench.kernel(0, produce, bench.x[1], bench.flags[1], False),
        lambda: bench.kernel(1, produce, bench.x[1], bench.flags[1], False),
    )
    assert isinstance(bench.machine.error, RaceError)
    assert bench.machine.error.finding.first.line == 10


def test_event_that_is_never_recorded_is_a_deadlock():
    bench, out = Bench(ranks=1), []

    def main():
        bench.machine.device.stream(0, "side").enqueue(EventWait(Event()))
        bench.kernel(0, consume, bench.x[0], 0, False, out, stream="side")

    report = bench.run(main)
    assert report.deadlocks[0].first.note == "queued the event wait"
    assert "stream side: 2 works behind" in report.deadlocks[0].message


def test_clocks_that_part_and_meet_know_the_same():
    """Joins of copies, in any order, against sets of what each was told."""
    import random

    from weft.emulator.clocks import Clock

    draw = random.Random(0)
    clocks, known = [Clock()], [{}]
    for _ in range(2000):
        i = draw.randrange(len(clocks))
        choice = draw.random()
        if choice < 0.4:
            agent, value = draw.randrange(40), draw.randrange(1000)
            clocks[i].learn(agent, value)
            known[i][agent] = max(known[i].get(agent, -1), value)
        elif choice < 0.6 and len(clocks) < 30:
            clocks.append(clocks[i].copy())
            known.append(dict(known[i]))
        elif choice < 0.65 and len(clocks) < 30:
            clocks.append(Clock())
            known.append({})
        else:
            j = draw.randrange(len(clocks))
            clocks[i].join(clocks[j])
            for agent, value in known[j].items():
                known[i][agent] = max(known[i].get(agent, -1), value)
        assert dict(clocks[i].agents) == known[i]


@pytest.mark.slow
def test_a_counter_for_everybody_is_cheap_and_still_orders():
    """Thousands of programs pass one counter; the last one may read what all have written."""

    def pass_by(rt, x, flags, sem, last):
        me = int(rt.pid[0])
        rt.store(np.int64(x + 4 * (me % 64)), np.float32(me), np.bool_(me < 64), F32, (), 90)
        if rt.atomic_rmw("add", sem, "gpu", flags, I64.type(1), None, I64, (), 91) == last:
            rt.load(x + np.arange(64) * 4, None, None, F32, (64,), 92)

    for sem, races in (("acq_rel", 0), ("relaxed", 1)):
        bench = Bench(ranks=1)
        report = bench.run(
            lambda: bench.kernel(0, pass_by, bench.x[0], bench.flags[0], sem, 2999, grid=3000)
        )
        assert len(report.races) == races
