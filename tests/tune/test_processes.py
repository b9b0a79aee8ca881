"""Processes of ranks: how they end."""

from __future__ import annotations

import time

import pytest

from weft.tune.processes import end, messages_from_gpus


def agree_late(rank, send):
    """All but rank 0 still ask for what is agreed when it has done all that it does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank:
        time.sleep(1.0)
        dist.distributed_c10d._get_default_store().check(["agreed"])
    send(rank)


@pytest.mark.slow
def test_the_store_is_there_until_all_ranks_have_ended():
    assert list(messages_from_gpus(agree_late, 2, silence_s=60.0)) == [0]


def test_all_are_killed_before_any_is_waited_for():
    """Who is interrupted once more in that time leaves none behind."""

    class Child:
        exitcode, alive = None, 2

        def kill(self):
            Child.alive -= 1

        def join(self):
            assert not Child.alive

    end([Child(), Child()])
