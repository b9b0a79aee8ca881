"""Laggards: the same seed is the same schedule, and who lags runs only if nobody else can."""

from __future__ import annotations

import torch
import triton

import weft
import weft.language as wl
from weft.verify.laggards import Laggards


@triton.jit
def tell(world, ready, e):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    wl.notify(world, ready, e, to=right, op="set")
    wl.wait(ready, at_least=e, world=world)


def main():
    world = weft.init()
    ready = world.signals(1, torch.int64)
    for e in range(1, 4):
        tell[(1,)](world.arg, ready, e)


def order_of(chooser) -> list:
    """Who ran, in order."""
    ran = []

    class Listening(type(chooser)):
        def pick(self, ready):
            place = super().pick(ready)
            ran.append((type(ready[place]).__name__, getattr(ready[place], "rank", None)))
            return place

    chooser.__class__ = Listening
    with weft.emulated(ranks=3, collect=True, chooser=chooser) as session:
        session.run(main)
    return ran


def test_a_seed_is_a_schedule():
    assert order_of(Laggards(5)) == order_of(Laggards(5))
    assert order_of(Laggards(5)) != order_of(Laggards(7))


def test_whoever_lags_runs_only_if_nobody_else_can():
    class Task:
        def __init__(self, rank):
            self.rank = rank

    chooser = Laggards(1)
    late, other = Task(0), Task(1)
    chooser._late, chooser._left = (0, "Task"), 20
    assert {chooser.pick([late, other]) for _ in range(10)} == {1}
    assert chooser.pick([late]) == 0
