"""Ranks that meet through a store of torch: who meets whom, what is exchanged, who did not come."""

from __future__ import annotations

import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torchrun import on_two_and_four_gpus, once, torchrun

from weft.base.errors import CallOrderError, TimeoutError
from weft.runtime.backends.cuda import check_names, meet_processes
from weft.runtime.store_meetings import StoreMeetings

SCRIPT = Path(__file__).parent / "scripts" / "groups_of_one_name.py"
SECOND = timedelta(seconds=20)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 4)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SECOND, wait_for_workers=False)


def at_once(*mains):
    """Each on a thread of its own; what they returned or raised."""
    results = [None] * len(mains)

    def run(number, main):
        try:
            results[number] = main()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=both) for both in enumerate(mains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_groups_meet_their_own_members_and_no_others(store):
    """Two groups without a common rank, and one that has a rank of each."""
    groups = [(0, 1), (2, 3), (0, 2)]

    def member(group, rank):
        def main():
            meetings = StoreMeetings(store, group, group.index(rank))
            return [
                meetings.exchange((turn, f"rank {rank} of {group}"), 20.0, "") for turn in range(3)
            ]

        return main

    for group, ranks in [(group, group) for group in groups]:
        found = at_once(*(member(group, rank) for rank in ranks))
        for each in found:
            assert each == [[(t, f"rank {r} of {group}") for r in group] for t in range(3)]


def test_worlds_of_one_group_are_told_apart_by_their_number(store):
    def member(rank, number):
        return lambda: StoreMeetings(store, (4, 5), rank, number=number).exchange(number, 20.0, "")

    found = at_once(member(0, 0), member(0, 1), member(1, 1), member(1, 0))
    assert found == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_what_lies_in_the_store_is_read_and_not_run(store):
    class Evil:
        def __reduce__(self):
            return pytest.fail, ("it was unpickled",)

    meetings = StoreMeetings(store, (0, 1), 0)
    store.set(meetings._key(0, 1), pickle.dumps(Evil()))
    with pytest.raises(ValueError):
        meetings.exchange("mine", 1.0, "")


def test_values_are_plain_and_tuples_come_as_tuples(store):
    meetings = StoreMeetings(store, (7,), 0)
    step = (3, "tensor", 512, "torch.int32", (4, (5,)), "x", None, 2.5)
    assert meetings.exchange(step, 1.0, "") == [step]
    with pytest.raises(TypeError, match="not JSON serializable"):
        meetings.exchange(object(), 1.0, "")


def test_ranks_that_do_not_come_are_named_in_time_and_can_be_met_again():
    store = dist.HashStore()
    meetings = StoreMeetings(store, (2, 5, 9), 0)
    StoreMeetings(store, (2, 5, 9), 1)
    began = time.monotonic()
    with pytest.raises(
        TimeoutError,
        match=r"rank 2 waits for rank 5, 9 of the group \[2, 5, 9\]: they did not come in 0\.2 s; "
        "call it",
    ):
        meetings.exchange(0, 0.2, "call it")
    assert time.monotonic() - began < 5
    rest = [StoreMeetings(store, (2, 5, 9), rank) for rank in (1, 2)]
    found = at_once(*(lambda m=m: m.exchange(m.rank, 20.0, "") for m in (meetings, *rest)))
    assert found == [[0, 1, 2]] * 3


def test_nobody_waits_for_ranks_once_the_world_has_aborted():
    meetings = StoreMeetings(dist.HashStore(), (0, 1), 0, is_aborted=lambda: True)
    with pytest.raises(TimeoutError, match="rank 0 waits for rank 1 .*: a wait of a kernel timed"):
        meetings.exchange(0, 60.0, "")


@pytest.mark.few(1)
@pytest.mark.parametrize("by_agent", [True, False], ids=["torchrun", "bare environment"])
def test_a_process_that_is_never_started_costs_what_is_set(by_agent, monkeypatch):
    """NCCL alone would wait ten minutes, and say nothing of who is missing."""
    if by_agent:
        server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=SECOND, wait_for_workers=False
        )
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        port, said = server.port, "rank 0 waits for rank 1 of the group .* come in 1 s; every"
    else:
        # One that is free, or was a moment ago.
        port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
        said = "rank 0 of 2 has not met the others in 1 s: .*WEFT_INIT_TIMEOUT_S sets how long"
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"(?s){said}"):
        meet_processes(1.0)
    assert time.monotonic() - began < 10


def test_processes_that_come_meet(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SECOND, wait_for_workers=False)
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    store, rank, num_ranks = meet_processes(5.0)
    assert (rank, num_ranks) == (0, 1) and store.add("counter", 1) == 1


def test_ranks_that_make_different_worlds_of_one_group_learn_it():
    check_names(["tp", "tp"], [4, 6])
    with pytest.raises(
        CallOrderError,
        match=r"on the group \[4, 6\]: rank 4 makes the world 'tp', but rank 6 makes 'dp'; every",
    ):
        check_names(["tp", "dp"], [4, 6])


SAID = r"rank (\d) of \d: (.*)"


def test_groups_of_one_name_emulated(ranks, capfd):
    import runpy

    ranks(lambda: runpy.run_path(str(SCRIPT), run_name="__main__") and None, 4)
    said = once([capfd.readouterr().out], r"rank 0 of 4: (.*)")
    assert said == ["tp tp.2 tp.3 tp.4"]


@on_two_and_four_gpus
def test_groups_of_one_name_under_torchrun(ranks):
    said = once(torchrun(SCRIPT, ranks), SAID)
    assert [rank for rank, _ in said] == [str(rank) for rank in range(ranks)]
    assert said[0][1] == "tp tp.2 tp.3 tp.4" and said[1][1] == "tp tp.2 tp.3"
