"""The remedy of a race fits it: what is missing is asked for, what is too weak is made stronger."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl


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
