"""What a kernel transfers, and how long that takes a core that computes meanwhile.

Predicted by formulas, from the numbers of tiles and their bytes; the runtime counts what is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.manycore.record import Machine

# What ends so much later is as good, if it needs fewer transfers.
NEARLY = 1.03


@dataclass(frozen=True)
class Traffic:
    """Transfers by DMA, of so many contiguous blocks and bytes; sends go to other ranks."""

    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    sends: int = 0
    send_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def __mul__(self, count: int) -> Traffic:
        return Traffic(*(one * count for one in vars(self).values()))

    def channel_ns(self, machine: Machine, active: int) -> float:
        """What a core's channel takes for them."""
        started = self.transfers * machine.dma_startup_ns + self.blocks * machine.dma_block_ns
        return started + self.bytes * machine.share_ns(active)

    def link_ns(self, machine: Machine, active: int) -> float:
        """What this core's sends take its share of the link."""
        started = self.sends * machine.dma_startup_ns
        return started + self.send_bytes * active / machine.link_gbps


def block(
    machine: Machine, rows: int, first_byte: int, num_bytes: int, pitches: tuple[int, int],
    by_rows: bool = False,
) -> Traffic:  # fmt: skip
    """One block of rows of so many bytes; `pitches` in memory and in the scratchpad."""
    if rows <= 0 or num_bytes <= 0:
        return Traffic()
    moved = rows * machine.lines(first_byte, num_bytes)
    if by_rows:
        return Traffic(rows, rows, moved)
    is_whole = pitches == (num_bytes, num_bytes)
    return Traffic(1, 1 if is_whole else rows, moved)


@dataclass(frozen=True)
class Pipeline:
    """A core's steps: `computed_ns` in all; `got` before `fetches` of the steps, of which `first`
    before the first, `put` behind `stores` of them."""

    steps: int
    fetches: int
    stores: int
    computed_ns: float
    first: Traffic
    got: Traffic
    put: Traffic

    def ns(self, machine: Machine, active: int, is_double: bool) -> float:
        """From the first transfer to the end of the last.

        Where transfers overlap, the next step's are posted when this one's have come and before it
        is computed: two steps take at least a transfer, its latency and a computation.
        """
        if not self.steps:
            return 0.0
        first, got, put = (
            one.channel_ns(machine, active) for one in (self.first, self.got, self.put)
        )
        latency = machine.dma_latency_ns
        if not is_double:
            return self.computed_ns + got + put + latency * (self.fetches + self.stores)
        # Between two transfers there may be steps that need none.
        step_ns, turn_ns = self.computed_ns / self.steps, self.computed_ns / self.fetches
        moved_ns = (got - first + put) / max(self.fetches - 1, 1)
        waited_ns = (moved_ns + latency + step_ns) / 2 + turn_ns - step_ns
        period_ns = max(turn_ns, moved_ns, waited_ns)
        last_ns = turn_ns + put / max(self.stores, 1) + latency
        return latency + first + period_ns * (self.fetches - 1) + last_ns


def fewest(found: Sequence[Any], transfers: Callable[[Any], int]) -> Any:
    """Of kernels that end nearly as early as the first, that with the fewest transfers."""
    ns = [one.ns() for one in found]
    early = [one for one, end in zip(found, ns) if end <= NEARLY * min(ns)]
    return min(early, key=transfers)
