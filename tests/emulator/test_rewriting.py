"""A session's rewrite: kernels and host operations changed before they run."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.base.errors import DeadlockError
from weft.emulator.rewriting import Rewrite
from weft.emulator.works import WordCopyWork


@triton.jit
def _read_when_ready(out, data, ready, world):
    wl.wait(ready, 1, world=world)
    tl.store(out, tl.load(data))


def hand_over():
    """Rank 0's engine copies a number to rank 1, then the word that says so."""
    world = weft.init()
    data, ready = world.zeros((1,), torch.int64), world.signals(1, torch.int64)
    out = torch.zeros(1, dtype=torch.int64)
    if world.rank == 0:
        world.copy(world.peer(data, 1), torch.tensor([7]))
        world.copy_word(world.peer(ready, 1), torch.tensor([1]))
    else:
        _read_when_ready[(1,)](out, data, ready, world.arg)
        return out.item()


class Words(Rewrite):
    """`place(stream)` is where word copies go."""

    def __init__(self, place):
        self.place = place
        self.texts = set()

    def kernel(self, text):
        self.texts.add(text)
        return super().kernel(text)

    def position(self, work, stream):
        if isinstance(work, WordCopyWork):
            return self.place(stream)
        return super().position(work, stream)


def run(rewrite, **options):
    with weft.emulated(ranks=2, rewrite=rewrite, **options) as session:
        return session.run(hand_over), session.report


def test_it_is_handed_each_kernel_and_changes_nothing_by_itself():
    rewrite = Words(lambda stream: len(stream.queue))
    (_, got), report = run(rewrite)
    assert got == 7 and report.ok
    assert len(rewrite.texts) == 1 and "weft.wait" in rewrite.texts.pop()


def test_what_is_left_out_never_runs():
    with pytest.raises(DeadlockError):
        run(Words(lambda stream: None))


@triton.jit
def _read(out, data):
    tl.store(out, tl.load(data))


@pytest.mark.parametrize("enough", [False, True])
def test_a_session_may_end_with_a_finding(enough):
    """What ranks would do later is left out."""

    class ToRace(Rewrite):
        def is_enough(self, finding):
            return enough and finding.kind == "race"

    came_here = []

    def main():
        world = weft.init()
        data = world.zeros((2,), torch.int64)
        out = torch.zeros(1, dtype=torch.int64)
        for i in range(2):
            if world.rank == 0:
                world.copy(world.peer(data, 1)[i : i + 1], torch.tensor([7]))
            else:
                _read[(1,)](out, data[i:])
            world.barrier()
            world.synchronize()
            came_here.append(i)

    with weft.emulated(ranks=2, collect=True, rewrite=ToRace()) as session:
        session.run(main)
    assert session.report.findings[0].kind == "race"
    assert (1 not in came_here) == enough


def test_what_goes_before_runs_before():
    (_, _), report = run(Words(lambda stream: 0), collect=True)
    assert {finding.kind for finding in report} == {"race"}


def test_a_word_may_be_another_one():
    class Larger(Rewrite):
        def position(self, work, stream):
            if isinstance(work, WordCopyWork):
                work.change = -1
            return super().position(work, stream)

    with pytest.raises(DeadlockError):
        run(Larger())
