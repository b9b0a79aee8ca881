"""Bytes that went from rank to rank: what was written in peers' memory, and read there.

By programs and copy engines; words of signals are no traffic, nor is what torch.distributed's own
collectives move.
"""

from __future__ import annotations

from collections import Counter

from weft.base.topology import Topology


class Traffic(Counter[tuple[int, int]]):
    """By (rank in whose memory they were, rank in whose memory they came, or that read them)."""

    def carried(self, source: int, target: int, num_bytes: int) -> None:
        self[source, target] += num_bytes

    def between_nodes(self, topology: Topology) -> Counter[tuple[int, int]]:
        """By (node, other node), from one to the other."""
        found: Counter[tuple[int, int]] = Counter()
        for (source, target), num_bytes in self.items():
            nodes = topology.seat(source).node, topology.seat(target).node
            if nodes[0] != nodes[1]:
                found[nodes] += num_bytes
        return found
