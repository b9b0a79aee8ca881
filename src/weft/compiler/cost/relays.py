"""When kernels that relay between nodes do what: rows that are passed on, and sums.

Steps of `plans.predict`, whose state `times` is: see there.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from itertools import product as pairs
from math import ceil
from typing import Any

from weft.base.schedule import LINKS
from weft.ir.device import Launch
from weft.ir.schedule import RELAYS

Steps = Generator[Sequence[Hashable], None, float]


def relay(times: Any, rank: int, lane: str, start: float, step: Launch) -> Steps:
    """Own rows to the node's other ranks and, by the own port, to a partner on each other node;
    theirs to the other ranks of this node, chunk by chunk as they come."""
    (name,), now = step.announces, start
    chunks, row_bytes = times.chunks_of(times.channels[name]), times.row_bytes(step.reads[0])
    near, end = times.near(rank), start
    each = max(1, ceil(times.rows_of(times.channels[name], 0) / chunks))

    def given(source: int, peers: Sequence[int], chunk: int, at: float) -> float:
        rows = min(each, max(0, times.rows_of(times.channels[name], source) - chunk * each))
        for peer in peers:
            at = times.push(rank, peer, rows * row_bytes, at)
            times.notify((name, peer, source, chunk), at, rank, LINKS)
        return at

    for chunk in range(chunks):
        for peers in (times.partners(rank), near):
            end = max(end, given(rank, peers, chunk, start))
    for chunk, source in pairs(range(chunks), times.relayed_by(rank)):
        now = yield from times.wait(rank, lane, now, [(name, rank, source, chunk)], name)
        end = max(end, given(source, near, chunk, now))
    return max(now, end)


def relay_sums(times: Any, rank: int, lane: str, start: float, step: Launch) -> Steps:
    """Each part of another node's rank that this one adds up: from all ranks of the node, and
    by its port to that rank, tile by tile while they are made."""
    (taken,), (name,), now, end, free = step.awaits, step.announces, start, start, start
    here = (rank, *times.near(rank))
    for shard in times.relayed_by(rank):
        nbytes = times.rows_of(times.channels[name], shard) * times.row_bytes(step.reads[0])
        keys = [(taken, rank, peer, shard) for peer in here]
        now = yield from times.wait(rank, lane, now, keys, taken)
        begun = max(free, *(times.arrived[key].first_us for key in keys))
        free = begun + nbytes * len(here) / (RELAYS * times.machine.combine_gbps * 1e3)
        end = max(now, free, times.push(rank, shard, nbytes, begun))
        times.notify((name, shard, rank), end, rank, LINKS)
    return max(now, end)
