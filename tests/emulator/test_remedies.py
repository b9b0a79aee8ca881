"""The remedy of a race fits it: what is missing is asked for, what is too weak is made stronger."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
import weft.ops


@triton.jit
def tell(world, x, told, N: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(world) == 0:
        wl.put(world, x + at, at, to=1)
        if HOW == "relaxed":
            wl.notify(world, told, to=1, order=wl.Order.RELAXED)
        elif HOW == "narrow":
            wl.notify(world, told, to=1, scope=wl.Scope.DEVICE)
        else:
            wl.notify(world, told, to=1)
    else:
        wl.wait(told, at_least=1)
        tl.store(x + at, tl.load(x + at) + 1)


@pytest.mark.parametrize("how", ["right", "relaxed", "narrow"])
def test_a_signal_that_is_too_weak(how: str):
    def main():
        world = weft.init()
        x, told = world.empty(16, torch.int32), world.signals(1)
        tell[(1,)](world.arg, x, told, 16, how)
        world.close()

    with weft.emulated(ranks=2, collect=True) as ranks:
        ranks.run(main)
    races = [race for race in ranks.report.races if race.first.tensor == "x@rank1"]
    assert bool(races) == (how != "right"), str(ranks.report)
    assert all(race.remedy.startswith("there, order RELEASE") for race in races)


def run(main, num_ranks: int = 2, seed: int = 0):
    with weft.emulated(ranks=num_ranks, seed=seed, collect=True) as ranks:
        ranks.run(main)
    return ranks.report


@triton.jit
def tell_of_three(world, x, y, z, told, N: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(world) == 0:
        wl.put(world, x + at, at, to=1)
        wl.put(world, y + at, at, to=1)
        wl.put(world, z + at, at, to=1)
        wl.notify(world, told, to=1, order=wl.Order.RELAXED)
    else:
        wl.wait(told, at_least=1)
        first = tl.load(x + at)
        second = tl.load(y + at)
        tl.store(x + at, first + second + tl.load(z + at))


def test_what_comes_of_one_weak_signal_is_one_finding():
    def main():
        world = weft.init()
        x, y, z = (world.empty(16, torch.int32) for _ in range(3))
        told = world.signals(1)
        tell_of_three[(1,)](world.arg, x, y, z, told, 16)
        world.close()

    report = run(main)
    (race,) = report.races
    assert race.remedy.startswith("there, order RELEASE") and "is relaxed" in race.message
    also = report.to_json()["races"][0]["also"]
    assert len(also) >= 2 and any("y at" in one for one in also)
    assert str(report).count("race: ") == 1 and "for the same reason:" in str(report)


@triton.jit
def wait_narrowly(world, told):
    if wl.rank(world) == 0:
        wl.notify(world, told, to=1)
    else:
        wl.wait(told, at_least=1, scope=wl.Scope.DEVICE)


def test_a_scope_that_is_too_small_is_named_with_its_line():
    def main():
        world = weft.init()
        told = world.signals(1)
        wait_narrowly[(1,)](world.arg, told)
        world.close()

    for seed in range(4):
        (race,) = run(main, seed=seed).races
        sides = {side.line: side for side in race.sides}
        line = wait_narrowly.fn.__code__.co_firstlineno + 5
        assert "scope DEVICE of the" in race.message and f":{line}" in race.message
        assert "SYSTEM" in race.remedy and "atomically by" not in race.message
        assert line in sides


@triton.jit
def signal_zero(world, ready):
    if wl.rank(world) != 0:
        wl.notify(world, ready, to=0)


@triton.jit
def wait_for_two(world, ready):
    if wl.rank(world) == 0:
        wl.wait(ready, at_least=2)


def test_a_reset_among_signals_is_named_in_every_schedule():
    def main(rank):
        world = weft.init()
        ready = world.signals(1)
        if rank == 0:
            ready.zero_()
        signal_zero[(1,)](world.arg, ready)
        wait_for_two[(1,)](world.arg, ready)
        world.close()

    kinds = set()
    for seed in range(12):
        report = run(main, 3, seed)
        races = [race for race in report.races if "is reset while" in race.message]
        assert races and races[0].remedy.startswith("world.signals are zero from the start")
        kinds |= {finding.kind for finding in report}
        for stuck in report.deadlocks:
            raise AssertionError(f"seed {seed}: the reset is not named in\n{stuck}")
    assert kinds == {"race", "lost signal"}, "schedules of both kinds are among these"


def test_a_wait_is_told_once():
    @triton.jit
    def wait_for_nobody(world, ready):
        wl.wait(ready, at_least=3)

    def main():
        world = weft.init()
        ready = world.signals(1)
        wait_for_nobody[(1,)](world.arg, ready)
        world.close()

    text = str(run(main))
    assert text.count("wl.wait(ready, at_least=3)") == 1
    assert "language/emu" not in text and "runtime/" not in text


def test_a_kernel_of_wefts_own_is_told_with_the_call():
    def main():
        world, x = weft.init(), torch.ones(4, 4)
        weft.ops.all_gather(x, world=world)
        if world.rank == 0:
            weft.ops.all_gather(x, world=world)  # alone
        world.close()

    lines = Path(__file__).read_text().splitlines()
    (call,) = (n for n, line in enumerate(lines, 1) if line.endswith("world=world)  # alone"))
    assert f"launched at {__file__}:{call}\n" in str(run(main))


@triton.jit
def fail_then_race(world, x, y):
    if wl.rank(world) == 0:
        tl.store(wl.at(world, x, 1), 1)
    else:
        tl.store(wl.at(world, y, 0), 1)
        tl.store(wl.at(world, y, 2), 1)


def test_what_follows_a_failure_is_told_in_a_line():
    def main():
        world = weft.init()
        x, y = torch.zeros(4, dtype=torch.int32), world.zeros(4, torch.int32)
        fail_then_race[(1,)](world.arg, x, y)
        world.close()

    for seed in range(8):
        report = run(main, 3, seed)
        follows = [finding for finding in report if finding.follows]
        if follows:
            break
    else:
        raise AssertionError("no schedule in which the failure came first")
    text = str(report)
    assert "after that, and maybe because of it:\n  race: rank" in text
    assert text.count("remedy:") == len(report.findings) - len(follows)
