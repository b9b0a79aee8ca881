"""Observers hear what happened, in order; without them, and with them, a seed is the same run."""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.emulator.choices import Seeded
from weft.emulator.observation import Recorder, Watch


@triton.jit
def tell(flag, world):
    wl.notify(world, flag, to=1 - wl.rank(world), value=3)
    wl.wait(flag, at_least=3)


def run(observers=(), seed=0):
    def main():
        world = weft.init()
        flag = world.signals(1)
        tell[(1,)](flag, world.arg)
        world.synchronize()
        value = int(flag[0])
        world.close()
        return value

    with weft.emulated(ranks=2, seed=seed, observers=observers) as ranks:
        results = ranks.run(main)
        assert ranks.report.ok
    return results


def told(recorder, kind):
    return [e for e in recorder.events if e.kind == kind and e.word and e.word.tensor == "flag"]


def test_a_signal_and_the_wait_that_it_satisfies():
    recorder = Recorder()
    assert run([recorder]) == [3, 3]
    signals, passes = told(recorder, "signal"), told(recorder, "pass")
    assert {(e.party.rank, e.word.rank, e.before, e.after) for e in signals} == {
        (0, 1, 0, 3),
        (1, 0, 0, 3),
    }
    by_word = {e.word.rank: e.step for e in signals}
    assert {e.party.rank: e.causes for e in passes} == {r: (by_word[r],) for r in (0, 1)}
    assert all(e.party.what == "kernel tell" and e.party.program == (0, 0, 0) for e in passes)
    assert all(e.place.outermost.source().startswith("wl.wait") for e in passes)
    assert [e.step for e in recorder.events] == list(range(recorder.seen))


def test_work_is_queued_begins_and_ends():
    recorder = Recorder()
    run([recorder])
    steps = [
        (e.kind, e.party.program)
        for e in recorder.events
        if e.party.what == "kernel tell" and e.party.rank == 0 and e.word is None
    ]
    assert steps == [
        ("queue", None), ("begin", None), ("begin", (0, 0, 0)), ("end", (0, 0, 0)), ("end", None),
    ]  # fmt: skip
    hosts = [e.kind for e in recorder.events if e.party == (1, "host", "", None, 0)]
    assert hosts == ["begin", "end"]


def test_a_wait_for_ever_is_stuck():
    def main():
        world = weft.init()
        flag = world.signals(1)
        if world.rank == 0:
            tell[(1,)](flag, world.arg)
        world.synchronize()

    recorder = Recorder()
    with weft.emulated(ranks=2, observers=[recorder], collect=True) as ranks:
        ranks.run(main)
    (stuck,) = told(recorder, "stuck")
    assert (stuck.expected, stuck.before) == (3, 0)
    assert [e.text for e in recorder.events if e.kind == "finding"] == ["unsatisfiable wait"]


def test_a_recorder_keeps_the_last_events():
    everything, few = Recorder(), Recorder(limit=5)
    run([everything, few])
    assert few.events == everything.events[-5:]
    assert few.dropped == everything.seen - 5


def test_a_seed_is_the_same_run_whoever_looks_on():
    first, second = Recorder(), Recorder()
    run([first], seed=7)
    run([second], seed=7)
    trace = [[(e.kind, e.party, e.before, e.after) for e in r.events] for r in (first, second)]
    assert trace[0] == trace[1]


def test_a_tile_of_atomics_is_told_word_by_word():
    import triton.language as tl

    @triton.jit
    def bump(words):
        tl.atomic_add(words + tl.arange(0, 4), tl.arange(0, 4) + 1)

    def main():
        words = torch.zeros(4, dtype=torch.int32)
        bump[(1,)](words)
        return words.tolist()

    recorder = Recorder()
    with weft.emulated(ranks=1, observers=[recorder]) as ranks:
        assert ranks.run(main) == [[1, 2, 3, 4]]
    changes = [(e.word.index, e.after) for e in recorder.events if e.kind == "signal"]
    assert changes == [(0, 1), (1, 2), (2, 3), (3, 4)]


@triton.jit
def read_after_write(x, world):
    if wl.rank(world) == 0:
        wl.put(world, x, 1.0, to=1)
    else:
        tl.store(x + 1, tl.load(x))


def test_the_earlier_access_of_a_race_has_the_step_at_which_it_was():
    def main():
        world = weft.init()
        x = world.empty((2,), torch.float32)
        x.zero_()
        world.barrier()
        read_after_write[(1,)](x, world.arg)
        world.close()

    def race(observers):
        with weft.emulated(ranks=2, collect=True, observers=observers) as ranks:
            ranks.run(main)
        return ranks.report.races[0]

    recorder = Recorder()
    observed = race([recorder])
    assert observed == race([])  # when it was is not what it is
    assert race([]).second.step is None
    writer = [e for e in recorder.events if e.party.what == "kernel read_after_write"]
    begin, end = (
        next(e.step for e in writer if e.kind == kind and e.party.rank == observed.second.rank)
        for kind in ("begin", "end")
    )
    found = next(e.step for e in recorder.events if e.kind == "finding")
    assert begin <= observed.second.step < min(end, found)


class Released(Seeded, Watch):
    """By the party of each release: what its agent's clock was when others heard of it, and what
    the word then held of that agent's past."""

    def __init__(self):
        super().__init__(0)
        self.clocks = {}

    def signalled(self, by, allocation, cell, before, after, place, how, release):
        if release is not None:
            published = list(allocation.sync_word(cell).published.values())
            known = max(clock.agents.get(by.agent, -1) for clock in published)
            self.clocks[type(by).__name__] = by.clk, known


def test_a_release_ends_the_past_that_it_publishes_whoever_releases():
    """Ledger and explorer take the clock before the release for a signal's, of actors too."""

    def main():
        with weft.init() as world:
            flag, words = world.signals(1), world.signals(2, dtype=torch.int64)
            tell[(1,)](flag, world.arg)
            world.copy_word(world.peer(words, 1 - world.rank)[:1], words[1:])
            world.synchronize()

    released = Released()
    with weft.emulated(ranks=2, chooser=released) as ranks:
        ranks.run(main)
    assert set(released.clocks) == {"Program", "Actor"}
    assert all(clk - 1 == known for clk, known in released.clocks.values())
