"""Signals between ranks: who is told of what, and how often before it is all there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.base.parts import full_part, part_of
from weft.manycore.traffic import Traffic
from weft.manycore.values import Value


@dataclass(frozen=True)
class Ready:
    """A signal for each source rank, the first is number `base`; `count`, as C, of the arrivals
    from `source` that are all. `after_ns`: when this rank's own data is there, when the nearest
    rank's, and how much later each further one's."""

    name: str
    base: int
    num_ranks: int
    count: str
    after_ns: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def symbol(self) -> str:
        return f"SIG_{self.name.upper()}"

    @property
    def all_ns(self) -> float:
        own, first, each = self.after_ns
        return max(own, first + each * (self.num_ranks - 2))

    def behind(self, ns: float, least_ns: float) -> float:
        """When work of so long is done that takes a shard after the other, as they come, each in
        `least_ns` or more."""
        own, first, each = self.after_ns
        n = self.num_ranks
        left = (max(ns * (n - i) / n, least_ns) for i in range(1, n))
        return max(own + ns, *(first + each * i + one for i, one in enumerate(left)))


@dataclass(frozen=True)
class Summands:
    """Tiles of partial sums, sent to the rank that owns their rows: to its slab for this rank in
    `parts`, where `ready` says that they are."""

    parts: Value
    ready: Ready
    size: int  # rows of all owners

    @property
    def num_ranks(self) -> int:
        return self.ready.num_ranks

    @property
    def each(self) -> int:
        return full_part(self.size, self.num_ranks)

    def traffic(self, product: Any, rank: int) -> Traffic:
        """What stays passes the DMA engine twice, as blocks of the scratchpad's pitch."""
        found = Traffic()
        machine, width = product.machine, self.parts.columns.on(rank)
        tile_m, tile_n = product.tile[:2]
        pitches = self.parts.pitch, machine.aligned(tile_n * self.parts.itemsize)
        for owner in range(self.num_ranks):
            first, end = part_of(self.size, owner, self.num_ranks)
            tiles = -(-end // tile_m) - first // tile_m if end > first else 0
            for column in range(0, width, tile_n):
                num_bytes = min(tile_n, width - column) * self.parts.itemsize
                if owner != rank:
                    found += Traffic(sends=tiles, send_bytes=(end - first) * num_bytes)
                    continue
                lines = machine.lines(column * self.parts.itemsize, num_bytes)
                is_whole = pitches == (num_bytes, num_bytes)
                blocks = tiles if is_whole else end - first
                found += Traffic(tiles, blocks, 2 * (end - first) * lines)
        return found
