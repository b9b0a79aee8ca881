"""torch's rendezvous, as its C++ does it: keys are numbered by one counter for each process."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from weft.runtime.backends.rendezvous import CountingStore, register

NAME = "CUDASymmetricMemory"


class Process:
    """One process: the counter of its exchanges, of whichever group."""

    def __init__(self) -> None:
        self.count = 0

    def all_gather(self, store: dist.Store, rank: int, value: str) -> list[str]:
        keys = [f"{NAME}/{self.count}/{peer}" for peer in range(2)]
        self.count += 1
        store.set(keys[rank], value)
        store.wait([keys[1 - rank]], timedelta(seconds=2))
        return [store.get(key).decode() for key in keys]


def meet_after(exchanges: tuple[int, int], is_counting: bool) -> list[list[str]]:
    """What two processes gather that have made so many exchanges before; two rounds."""
    shared = dist.HashStore()
    results: list[list[str]] = [[], []]

    def run(rank: int) -> None:
        process = Process()
        process.count = exchanges[rank]
        store = CountingStore(shared, "world") if is_counting else shared
        for turn in range(2):
            results[rank] += process.all_gather(store, rank, f"{rank}.{turn}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("exchanges", [(0, 0), (3, 0), (2, 7)])
def test_ranks_meet_whatever_they_have_met_for_before(exchanges):
    gathered = ["0.0", "1.0", "0.1", "1.1"]
    assert meet_after(exchanges, is_counting=True) == [gathered, gathered]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_it_they_would_wait_for_keys_that_nobody_sets():
    assert meet_after((3, 0), is_counting=False) == [[], []]


def test_two_worlds_of_one_store_do_not_mix():
    shared = dist.HashStore()
    first, second = (CountingStore(shared, name) for name in ("tp/0", "tp/1"))
    first.set(f"{NAME}/4/0", b"first")
    second.set(f"{NAME}/5/0", b"second")
    assert first.get(f"{NAME}/4/0") == b"first" and second.get(f"{NAME}/5/0") == b"second"


def test_torch_finds_the_group_and_calls_its_store_from_its_own_code():
    """As the rendezvous does: by name, then set, wait and get of the group's store."""
    name = register(dist.HashStore(), "4-6/0", 1, 2)
    group = _resolve_process_group(name)
    assert (group.rank(), group.size()) == (1, 2)
    outer = dist.PrefixStore("outer", group.get_group_store())
    outer.set("x/9/0", b"\x00\x01\xff")
    outer.wait(["x/9/0"])
    outer.wait(["x/9/0"], timedelta(seconds=1))
    assert outer.get("x/9/0") == b"\x00\x01\xff"
