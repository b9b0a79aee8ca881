"""Collectives between ranks: blocks of main memory that are sent to others, with a signal each.

    gather    each rank sends its rows, or columns, to all
    scatter   each rank sends every owner the rows, or columns, that it owns, to a slab of summands

Cores send a part of the rows each. Nobody waits here: who reads what was sent awaits its signals.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.parts import part_of
from weft.manycore.record import Machine
from weft.manycore.signals import Ready
from weft.manycore.traffic import Traffic, block
from weft.manycore.values import Value, View


@dataclass(frozen=True)
class Exchange:
    """`into` is the gathered value, or the slabs of summands, one below the other."""

    name: str
    text: str
    source: View
    into: Value
    dim: int
    is_gather: bool
    size: int  # along dim, of all ranks
    ready: Ready
    machine: Machine
    awaits: tuple[Ready, ...] = ()

    kind = "exchange"
    map = None

    @property
    def num_ranks(self) -> int:
        return self.ready.num_ranks

    def sent(self, rank: int, peer: int) -> tuple[int, int]:
        """Rows and columns that a rank sends a peer."""
        first, end = part_of(self.size, rank if self.is_gather else peer, self.num_ranks)
        if self.dim == 0:
            return end - first, self.source.columns.on(rank)
        return self.source.num_rows.on(rank), end - first

    @property
    def active(self) -> int:
        return max(senders(self.sent(0, 0)[0], self.machine.cores), 1)

    def traffic(self, rank: int) -> Traffic:
        found, size = Traffic(), self.source.value.itemsize
        pitches = self.into.pitch, self.source.value.pitch
        for peer in range(self.num_ranks):
            rows, columns = self.sent(rank, peer)
            count = senders(rows, self.machine.cores)
            if peer != rank:
                found += Traffic(sends=count, send_bytes=rows * columns * size)
                continue
            is_beside = self.is_gather and self.dim == 1
            first = part_of(self.size, rank, self.num_ranks)[0] if is_beside else 0
            each = -(-rows // count) if count else 0
            for i in range(count):
                num = min(each, rows - i * each)
                one = block(self.machine, num, first * size, columns * size, pitches)
                found += Traffic(one.transfers, one.blocks, 2 * one.bytes)
        return found

    def ns(self, rank: int = 0) -> float:
        """It leaves at once; what is under way is in `ready`."""
        return 0.0


def senders(rows: int, cores: int) -> int:
    """How many cores have a part of so many rows."""
    return -(-rows // -(-rows // cores)) if rows else 0


def after_ns(machine: Machine, rows: int, row_bytes: int) -> tuple[float, float, float]:
    """When a rank's own block is there, when the nearest rank's is, and how much later each further
    one's: each core moves its part of all of them, its own by DMA and the others by the link."""
    active = max(senders(rows, machine.cores), 1)
    num_bytes = -(-rows // active) * row_bytes
    own = machine.dma_startup_ns + 2 * num_bytes * machine.share_ns(active)
    each = machine.dma_startup_ns + num_bytes * active / machine.link_gbps
    behind = machine.signal_ns
    return own + machine.dma_latency_ns + behind, each + machine.link_latency_ns + behind, each
