"""Steps on their way between processes, as on GPUs but by gloo alone, and processes that die."""

from __future__ import annotations

import os
import queue
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from weft.serve.link import HEAD, Link
from weft.serve.step import Part, Step
from weft.tune.processes import RanksStopped, beside

RANKS, DEATH = 3, 666


def link_of(rank: int) -> Link:
    dist.init_process_group("gloo")
    seats = SimpleNamespace(global_ranks=tuple(range(RANKS)))
    return Link(SimpleNamespace(rank=rank, num_ranks=RANKS, backend=SimpleNamespace(seats=seats)))


def follow(rank: int) -> None:
    link = link_of(rank)
    assert link.fewest(10 - rank) == 8
    seen = 0
    while (step := link.receive()) is not None:
        assert step == step_of(seen)
        seen += 1
        if step.parts[0].tokens[0] == DEATH and rank == 1:
            os._exit(7)


def step_of(number: int) -> Step:
    return Step((Part((DEATH if number == 2 else number,) * (1 + number * HEAD), 5, (1, 2)),))


@pytest.fixture
def failures():
    """What becomes of ranks, and this process as it was, which is rank 0 meanwhile."""
    before = dict(os.environ)
    yield queue.Queue()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
def test_all_processes_get_all_steps(failures):
    with beside(follow, RANKS, grace_s=60.0, failed=failures.put):
        link = link_of(0)
        assert link.fewest(10) == 8
        link.send(step_of(0))
        link.send(step_of(1))
        link.send(None)
    assert failures.empty()


@pytest.mark.slow  # the next test waits for one that died too
def test_rank_0_hears_of_a_process_that_died_by_its_next_step(failures):
    others = beside(follow, RANKS, grace_s=60.0, failed=failures.put)
    with pytest.raises(RuntimeError), others:
        link = link_of(0)
        link.fewest(10)
        for number in range(3):
            link.send(step_of(number))
        begin = time.monotonic()
        while time.monotonic() < begin + 60:
            link.send(step_of(3))
            time.sleep(0.05)
    assert failures.empty()


@pytest.mark.slow
def test_where_rank_0_does_not_hear_of_it_another_thread_says_so(failures):
    others = beside(follow, RANKS, grace_s=0.2, failed=failures.put)
    with pytest.raises(RanksStopped, match=r"ended with \[7, -9\]"), others:
        link = link_of(0)
        link.fewest(10)
        for number in range(3):
            link.send(step_of(number))
        failure = failures.get(timeout=60)
    assert isinstance(failure, RanksStopped) and "ended with [7, None]" in str(failure)
