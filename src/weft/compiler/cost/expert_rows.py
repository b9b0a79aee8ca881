"""Rows of tokens to their experts' ranks, and back, over several nodes: what crosses, how long.

Each rank's tokens choose all experts alike often. A rank's row goes to every far rank that has one
of its experts, or, relayed, once to each node that has one, and from there to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from weft.base.hardware import Hardware
from weft.base.topology import Topology


@dataclass(frozen=True)
class Crossing:
    """Rows on average: `far` those that the busiest rank's port carries one way, `near` those that
    a rank stores in its node, `passed` those that a rank passes on there, once they are here."""

    far: float
    near: float
    passed: float
    row_bytes: int

    def us(self, machine: Hardware | None) -> float:
        """How long rows move: far ones and near ones at once, then what is passed on. Where no
        machine was measured, far rows alone."""
        if machine is None:
            return self.far
        far_us = machine.far_us + self.far * self.row_bytes / machine.far_gbps / 1e3
        near_us, passed_us = (
            rows * self.row_bytes / machine.push_gbps / 1e3 for rows in (self.near, self.passed)
        )
        return max(far_us, near_us) + passed_us


def crossing(
    nodes: Sequence[int], rows: int, row_bytes: int, experts: int, own: int, top_k: int,
    is_relayed: bool,
) -> Crossing:  # fmt: skip
    """Of `rows` tokens of each rank, with top_k of `experts` each, of which a rank has `own`."""
    topology, first = Topology(tuple(nodes)), 0
    held = [max(0, min(own, experts - rank * own)) for rank in range(sum(nodes))]
    # Of a token: how likely a rank has one of its experts, how likely a node.
    of_rank = [_chosen(one, experts, top_k) for one in held]
    of_node = []
    for size in nodes:
        of_node.append(_chosen(sum(held[first : first + size]), experts, top_k))
        first += size
    seats = [topology.seat(rank) for rank in range(len(held))]
    out, into, near, passed = ([0.0] * len(held) for _ in range(4))
    for source, seat in enumerate(seats):
        for to, other in enumerate(seats):
            if other.node == seat.node:
                near[source] += of_rank[to] * (to != source)
                continue
            partner = to - other.local_rank + seat.local_rank % other.local_size
            if not is_relayed:
                out[source] += of_rank[to]
                into[to] += of_rank[to]
            elif to == partner:
                out[source] += of_node[other.node]
                into[to] += of_node[other.node]
            else:
                passed[partner] += of_rank[to]
    far = max((*out, *into), default=0.0)
    return Crossing(far * rows, max(near, default=0.0) * rows, max(passed) * rows, row_bytes)


def _chosen(held: int, experts: int, top_k: int) -> float:
    """How likely one of top_k different experts, of so many, is one of those held."""
    return 1 - comb(experts - held, top_k) / comb(experts, top_k)
