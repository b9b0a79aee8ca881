"""How far ranks' clocks are apart: each rank asks rank 0 for the time, and halves the way.

    asked = clock of rank r;   there = clock of rank 0;   answered = clock of rank r
    offset = there - (asked + answered) / 2        what to add to rank r's clock for rank 0's

The way there and back took answered - asked. So much is known for sure: the offset is off by no
more than half of it. Of `ROUNDS` questions the one that was answered first counts.

Source  Cristian, Probabilistic clock synchronization (1989); NTP's clock offset (RFC 5905)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl

ROUNDS = 16


class Offset(NamedTuple):
    """What to add to a rank's clock to have rank 0's, and how far off that may be."""

    ns: int
    error_ns: int


@triton.jit
def ask_and_answer(asked, answered, times, world, rounds):
    """Rank 0 answers one rank after the other. times: [num_ranks, rounds, 2], of own clocks"""
    rank = wl.rank(world)
    if rank == 0:
        for peer in range(1, world.num_ranks):
            for turn in range(rounds):
                wl.wait(asked + peer, turn + 1, world=world)
                tl.store(times + (peer * rounds + turn) * 2, wl.timestamp())
                wl.notify(world, answered, to=peer)
    else:
        for turn in range(rounds):
            place = times + (rank * rounds + turn) * 2
            tl.store(place, wl.timestamp())
            wl.notify(world, asked + rank, to=0)
            wl.wait(answered, turn + 1, world=world)
            tl.store(place + 1, wl.timestamp())


def offsets(world: Any) -> list[Offset]:
    """Of all ranks, by rank; rank 0's is 0. Collective; blocks the host."""
    asked = world.signals(world.num_ranks, name="clocks_asked")
    answered = world.signals(1, name="clocks_answered")
    shape = (world.num_ranks, ROUNDS, 2)
    times = torch.zeros(shape, dtype=torch.int64, device=world.device)
    launch: Any = ask_and_answer[(1,)]
    launch(asked, answered, times, world.arg, ROUNDS, num_warps=1)
    world.synchronize()
    everyone = world.backend.exchange(times.tolist(), world.meeting_timeout_s)
    world.free(answered)
    world.free(asked)
    theirs = [estimate(everyone[rank][rank], everyone[0][rank])
              for rank in range(1, world.num_ranks)]  # fmt: skip
    return [Offset(0, 0), *theirs]


def estimate(own: Sequence[Sequence[int]], there: Sequence[Sequence[int]]) -> Offset:
    """From (asked, answered) by the own clock and (when, ..) by rank 0's, of each round."""
    rounds = zip(own, there, strict=True)
    (asked, answered), (when, *_) = min(rounds, key=lambda one: one[0][1] - one[0][0])
    return Offset(when - (asked + answered) // 2, (answered - asked + 1) // 2)
