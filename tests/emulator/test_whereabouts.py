"""Ctrl-C says who runs where."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
import torch
import triton
import triton.language as tl

import weft


@triton.jit
def grind(x, turns):
    """Until the word at `turns` is met, which may change meanwhile."""
    i = 0
    while i < tl.load(turns):
        tl.store(x, tl.load(x) + 1)
        i += 1


ENDLESS = 1 << 40


@pytest.fixture
def interruptible():
    """What runs in a shell's background is born deaf to Ctrl-C; and one that comes while garbage is
    collected is lost in hypothesis's callback, which Python lets raise nothing."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def interrupt_once(has_begun):
    """Ctrl-C, once `has_begun()`, from a thread."""

    def interrupt():
        while not has_begun():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_ctrl_c_says_where_a_kernel_was(interruptible):
    counted = torch.zeros(1, dtype=torch.int32).numpy()

    def main():
        grind[(1,)](torch.from_numpy(counted), torch.tensor([ENDLESS]))

    interrupt_once(lambda: counted[0] > 1)
    with weft.emulated(ranks=1) as ranks:
        with pytest.raises(KeyboardInterrupt, match=r"rank 0 runs grind\(0, 0, 0\) at test_where"):
            ranks.run(main)


def test_ctrl_c_says_where_a_host_was(interruptible):
    begun = threading.Event()

    def main(rank):
        while rank == 1:
            begun.set()

    interrupt_once(begun.is_set)
    with weft.emulated(ranks=2) as ranks:
        with pytest.raises(KeyboardInterrupt, match="rank 1's host is at .*test_whereabouts.py:"):
            ranks.run(main)


def test_ctrl_c_is_not_lost_where_it_ends_no_wait(interruptible):
    """As one that came to another thread, or just before the main thread waits for a rank's."""

    def main():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            pass
        return "never interrupted"

    began = time.monotonic()
    with weft.emulated(ranks=1) as ranks:
        with pytest.raises(KeyboardInterrupt, match="rank 0's host is at .*test_whereabouts.py:"):
            ranks.run(main)
    assert time.monotonic() - began < 15
