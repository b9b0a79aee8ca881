"""When a product's launches run of which each leaves a chunk of columns to copy engines, and the
last one, of own rows, adds up what other ranks' engines have brought.

Steps of `plans.predict`, whose state `times` is: see there.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from weft.base.counts import counted
from weft.compiler.cost.products import FIRST_OPERANDS_US, parts_us, staged_gbps
from weft.ir.device import Channel, Launch

Steps = Generator[Sequence[Hashable], None, float]


def others(times: Any, rank: int, start: float, step: Launch) -> float:
    """All other ranks' rows of one chunk."""
    product, (chunk, chunks) = times.product(rank, step), step.piece
    if not product.m or times.num_ranks == 1:
        return start
    took = parts_us(product, times.multiplies(rank), times.num_ranks - 1, chunks)
    title = f"{counted(product.m - product.rows, 'row')} for others, chunk {chunk}"
    return times.work(rank, title, start + FIRST_OPERANDS_US, took, rank)


def own(times: Any, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
    """Own rows, chunk by chunk, each when it has come from all other ranks."""
    rows, now = times.rows_of(channel, rank), start
    if not rows:
        return now
    machine, chunks = times.machine, times.chunks_of(channel)
    took = parts_us(times.product(rank, step), times.multiplies(rank), 1, 1) / chunks
    gbps = staged_gbps(step.tile[1], machine)
    nbytes = rows * times.row_bytes(step.writes[0]) / chunks
    for chunk in range(chunks):
        title = f"{counted(rows, 'row')} of rank {rank}'s part, chunk {chunk}"
        now = times.work(rank, title, now, took, rank)
        now = yield from times.add_up(
            rank, now, channel.name, nbytes, gbps, times.peers(rank), chunk
        )
    return now
