"""A run that takes long says who runs where, once; so does Ctrl-C."""

from __future__ import annotations

import _thread
import signal
import threading
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.emulator.choices import Seeded
from weft.emulator.whereabouts import RUNS, Watchman, whereabouts


@triton.jit
def grind(x, turns):
    """Until the word at `turns` is met, which may change meanwhile."""
    i = 0
    while i < tl.load(turns):
        tl.store(x, tl.load(x) + 1)
        i += 1


ENDLESS = 1 << 40


class Over(threading.Event):
    """Counts how often it is looked at, and lets nobody wait long."""

    looks = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        return super().wait(min(timeout or 0.0, 0.01))


def told_of(main, after_s: float = 0.05, begun: threading.Event | None = None) -> list[str]:
    """What the watchman says of `main(rank, said, over)`, asked once `begun` is set."""
    said: list[str] = []
    over = Over()

    def look():
        if begun is not None:
            begun.wait()
        Watchman(said.append, after_s).look(over)

    watch = threading.Thread(target=look)
    watch.start()
    with weft.emulated(ranks=2) as ranks:
        ranks.run(lambda rank: main(rank, said, over))
    over.set()
    watch.join()
    return said


def test_a_host_that_loops():
    begun = threading.Event()

    def main(rank, said, over):
        while rank == 1 and not said:
            begun.set()

    (said,) = told_of(main, begun=begun)
    assert "rank 1's host is at" in said and "test_whereabouts.py:" in said and "Ctrl-C" in said


def test_a_kernel_that_loops():
    wanted = "rank 0 runs grind(0, 0, 0) at test_whereabouts.py:"
    turns = [np.array([ENDLESS]), np.array([1])]
    said: list[str] = []

    def main(rank):
        grind[(1,)](torch.zeros(1, dtype=torch.int32), torch.from_numpy(turns[rank]))

    def ask():
        while not any(wanted in one and "tl.store(x, tl.load(x) + 1)" in one for one in said):
            said.extend(whereabouts(run.scheduler) for run in RUNS[-1:])
        turns[0][0] = 0

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)
    asker.join()


def test_whoever_has_the_turn_is_named(monkeypatch):
    """Asked before every step that anybody takes, also where a stream starts its next work."""
    said: set[str] = set()
    pick = Seeded.pick

    def pick_and_ask(chooser, ready):
        said.update(whereabouts(run.scheduler) for run in RUNS[-1:])
        return pick(chooser, ready)

    monkeypatch.setattr(Seeded, "pick", pick_and_ask)
    with weft.emulated(ranks=2) as ranks:
        ranks.run(lambda: grind[(2,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1)))
    for rank in range(2):
        for what in ("'s host is at", " does its next work", " runs grind("):
            assert any(one.startswith(f"rank {rank}{what}") for one in said), said


def test_a_short_run_is_not_spoken_of():
    def main(rank, said, over):
        while over.looks < 3:
            pass

    assert told_of(main, 3600.0) == []


@pytest.fixture
def interruptible():
    """What runs in a shell's background is born deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_says_where_a_kernel_was(interruptible):
    def main():
        grind[(1,)](torch.zeros(1, dtype=torch.int32), torch.tensor([ENDLESS]))

    def interrupt():
        while not any("runs grind" in whereabouts(run.scheduler) for run in RUNS[-1:]):
            time.sleep(0.02)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    with weft.emulated(ranks=1) as ranks:
        with pytest.raises(KeyboardInterrupt, match=r"rank 0 runs grind\(0, 0, 0\) at test_where"):
            ranks.run(main)
