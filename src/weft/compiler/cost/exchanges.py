"""When kernels with an all-to-all in them do what: columns that leave, and columns that arrive.

Steps of `plans.predict`, whose state `times` is: see there.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from weft.base.counts import counted
from weft.base.schedule import PROGRAMS
from weft.compiler.cost.products import leaving_us, multiply_us, tile_us
from weft.ir.device import Channel, Launch

Steps = Generator[Sequence[Hashable], None, float]


def exchange(times: Any, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
    """Of own rows each other rank's columns, which leave as they are made, own ones last; then the
    other ranks' rows, as they have come."""
    product, machine, now = times.product(rank, step), times.multiplies(rank), start
    alone, columns = 0.0, product.n / times.num_ranks
    if product.m:
        programs = times.programs_of(step, product)
        alone = multiply_us(replace(product, num_ranks=1), machine, programs)
        alone += leaving_us(product, machine)
    for owner in (*times.peers(rank), rank):
        begun, title = now, f"{counted(int(columns), 'column')} of rank {owner}"
        now = times.work(rank, title, now, alone / times.num_ranks, owner)
        if owner != rank:
            nbytes = product.m * columns * product.itemsize
            times.send(rank, owner, nbytes, begun, now, channel.name)
    for peer in times.peers(rank):
        now = yield from times.wait(rank, PROGRAMS, now, [(channel.name, rank, peer)], channel.name)
        rows = times.rows_of(channel, peer)
        took = 2 * rows * times.row_bytes(step.writes[0]) / (machine.memory_gbps * 1e3)
        now = times.work(rank, f"{counted(rows, 'row')} of rank {peer} are stored", now, took, peer)
    return now


def slices(times: Any, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
    """Own rows, a chunk of them when all ranks have sent their columns of it."""
    product, machine = replace(times.product(rank, step), num_ranks=1), times.multiplies(rank)
    if not product.m:
        return start
    programs, each_us = times.programs_of(step, product), tile_us(product, machine)
    each = max(1, ceil(times.rows_of(channel, 0) / times.chunks_of(channel)))
    firsts, arrivals, now = range(0, product.m, each), [], start
    for chunk, row in enumerate(firsts):
        keys = [(name, rank, peer, chunk) for name in step.awaits for peer in times.peers(rank)]
        now = yield from times.wait(rank, PROGRAMS, now, keys, ", ".join(step.awaits))
        first = row // step.tile[0]
        arrivals.append((max([start, *(times.arrived[key].at_us for key in keys)]), first))
        end_row = min(product.tiles[0], (row + each) // step.tile[0])
        if chunk + 1 == len(firsts):
            end_row = product.tiles[0]
        took = (end_row - first) * product.tiles[1] * each_us / programs
        if chunk + 1 == len(firsts):
            took = max(took, multiply_us(product, machine, programs, arrivals) - now)
        title = f"{counted(min(each, product.m - row), 'row')} by all ranks' columns"
        now = times.work(rank, title, now, took, rank)
    return now
