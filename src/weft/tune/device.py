"""What the protocol asks of a machine: time one call, freeze it, meet the other ranks.

Tests put a fake in the place of `GpuDevice`; emulated ranks have a clock of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

LOST = float("nan")

# A held stream is let go after this long, and so many times what the host needs.
MIN_HOLD_US, HOLD_SLACK = 400.0, 2.0
# Clock cycles of a GPU in a microsecond, at least: a hold may be longer than asked, not shorter.
CYCLES_PER_US = 2000
# Calls before a burst is timed: the host then runs as it does in a program, neither cold nor ahead.
LEAD_IN = 3
HOST_CALLS = 10
HOST_REPEATS = 5


@triton.jit
def _nothing(a, b, c, d, m, n, k):
    """An empty kernel with an operator's worth of arguments."""


class GpuDevice:
    """A rank of a world on GPUs, timed by CUDA events. All calls are collective."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.l2_bytes = torch.cuda.get_device_properties(world.device).L2_cache_size
        self._swept = torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device=world.device)

    def warm_us(self, call: Callable[[], Any]) -> float:
        """Call once and wait; the host time it took to enqueue."""
        began = time.perf_counter()
        call()
        took = (time.perf_counter() - began) * 1e6
        torch.cuda.synchronize()
        return took

    def held_us(self, call: Callable[[], Any], host_us: float) -> float:
        """One call's time, all ranks beginning together, the host's time hidden.

        The stream is held while the host, which takes `host_us`, enqueues; LOST where it took
        longer, so that its time showed.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        released = torch.cuda.Event()
        torch.cuda._sleep(int((MIN_HOLD_US + HOLD_SLACK * host_us) * CYCLES_PER_US))
        released.record()
        self.world.barrier()
        begin.record()
        call()
        end.record()
        is_lost = released.query()
        end.synchronize()
        return LOST if is_lost else begin.elapsed_time(end) * 1e3

    def burst_us(self, calls: Sequence[Callable[[], Any]], count: int) -> float:
        """The time of one of `count` calls, taken in turn, as the host enqueues them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.world.barrier()
        torch.cuda.synchronize()
        for number in range(min(LEAD_IN, count)):
            calls[number % len(calls)]()
        begin.record()
        for number in range(count):
            calls[number % len(calls)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    def host_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Host time of a call when many are enqueued: median over repeats."""
        took = []
        for _ in range(HOST_REPEATS):
            torch.cuda.synchronize()
            self.world.barrier()
            began = time.perf_counter()
            for number in range(HOST_CALLS):
                calls[number % len(calls)]()
            took.append((time.perf_counter() - began) * 1e6 / HOST_CALLS)
        torch.cuda.synchronize()
        return sorted(took)[len(took) // 2]

    def bare_launch_us(self) -> float:
        """What `host_us` reads for an empty Triton kernel."""
        x = torch.empty(16, device=self.world.device)
        launch = lambda: _nothing[(1,)](x, x, x, x, 1024, 1024, 1024)  # noqa: E731
        self.warm_us(launch)
        return self.host_us([launch])

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """`call` frozen: what replays it, and the answer that replays write to."""
        with self.world.record() as recording:
            answer = call()
        return recording.replay, answer

    def slowest(self, times: list[list[float]]) -> list[list[float]]:
        """Each element's maximum over ranks; LOST where it is lost on any."""
        everyone = self.agree(times)
        return [
            [max(cells) if all(cell == cell for cell in cells) else LOST for cells in zip(*rows)]
            for rows in zip(*everyone)
        ]

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self.world.backend.exchange(value, timeout_s=180.0)

    def sweep(self) -> None:
        """Put everything out of L2."""
        self._swept.fill_(1)

    def settle(self) -> None:
        """Wait until this rank's work is done. Raises what went wrong on the device"""
        self.world.synchronize()


class EmulatedDevice(GpuDevice):
    """An emulated rank, timed in steps of the emulator's scheduler, of all ranks together: how much
    they do and wait, which is the same for one seed, and not what a GPU takes."""

    l2_bytes = 0

    def __init__(self, world: Any) -> None:
        self.world = world

    def warm_us(self, call: Callable[[], Any]) -> float:
        call()
        self.settle()
        return 0.0

    def held_us(self, call: Callable[[], Any], host_us: float) -> float:
        begin = self._steps()
        call()
        self.settle()
        return self._steps() - begin

    def burst_us(self, calls: Sequence[Callable[[], Any]], count: int) -> float:
        return self.held_us(calls[0], 0.0)

    def host_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        return 0.0

    def _steps(self) -> float:
        """Rank 0's reading, on all ranks."""
        return float(self.agree(self.world.backend.machine.scheduler.steps)[0])
