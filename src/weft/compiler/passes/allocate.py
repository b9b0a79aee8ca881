"""Give buffers their memory: those whose lives do not meet share it.

    gated = buffer(bfloat16, (m, Part(12288)))    ->    buffer(..., shares=...)

A buffer lives from its first use to its last, on all ranks that use it: what peers write must be
ordered behind the last reader over a channel. Lives are those of the plan's own order, so which
buffers share is known when it is compiled; how large they are follows from the sizes of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.parts import full_part, part_of
from weft.compiler.passes.tile import number
from weft.ir import device
from weft.ir.device import NO_MEMORY, NUM_RANKS, Buffer, Part, Plan, Tiles
from weft.ir.tensor import Size

ALIGNMENT = 256


def allocate(plan: Plan) -> Plan:
    """From stage signalled to stage allocated."""
    shares: dict[str, str] = {}
    homes: list[Buffer] = []
    for buffer in plan.of(Buffer):
        if buffer.role in NO_MEMORY:
            continue
        home = next((one for one in homes if _can_share(plan, buffer, one, shares)), None)
        if home is None:
            homes.append(buffer)
        else:
            shares[buffer.name] = home.name
    statements = tuple(
        replace(one, shares=shares[one.name])
        if isinstance(one, Buffer) and one.name in shares else one
        for one in plan.statements
    )  # fmt: skip
    return replace(plan, statements=statements, stage="allocated")


def _can_share(plan: Plan, buffer: Buffer, home: Buffer, shares: Mapping[str, str]) -> bool:
    """A result stays the caller's: it shares nothing."""
    if buffer.role != home.role or {buffer.name, home.name} & {*plan.results}:
        return False
    there = [home.name, *(name for name, other in shares.items() if other == home.name)]
    return all(device.are_apart(plan, name, buffer.name) for name in there)


class Region(NamedTuple):
    """Bytes of one buffer from `offset` on, within what is allocated of its role."""

    buffer: str
    role: str
    offset: int
    num_bytes: int
    first_step: int
    last_step: int


def layout(plan: Plan, sizes: Mapping[str, int], num_ranks: int) -> dict[str, Region]:
    """Where the buffers of a call lie, those that share at one offset. The same on all ranks:
    parts are reckoned with as if they were full."""
    buffers = {one.name: one for one in plan.of(Buffer) if one.role not in NO_MEMORY}
    needed = {name: bytes_of(one, sizes, num_ranks) for name, one in buffers.items()}
    homes: dict[str, int] = {}
    for name, buffer in buffers.items():
        home = buffer.shares or name
        homes[home] = max(homes.get(home, 0), needed[name])
    ends: dict[str, int] = {}
    offsets: dict[str, int] = {}
    for home, num_bytes in homes.items():
        role = buffers[home].role
        offsets[home] = ends.get(role, 0)
        ends[role] = offsets[home] + -(-num_bytes // ALIGNMENT) * ALIGNMENT
    lives = plan.lifetimes
    return {
        name: Region(name, one.role, offsets[one.shares or name], needed[name], *lives[name])
        for name, one in buffers.items()
    }


def bytes_of(buffer: Buffer, sizes: Mapping[str, int], num_ranks: int) -> int:
    """Of one rank whose parts are full."""
    total = DTYPES[buffer.dtype].itemsize
    for size in buffer.sizes:
        total *= extent_of(size, sizes, 0, num_ranks)
    return total


def extent_of(
    size: Size | Part | Tiles, sizes: Mapping[str, int], rank: int, num_ranks: int
) -> int:
    """A size of a buffer as a number, on a rank."""
    if type(size) is int:
        return size
    is_split = isinstance(size, Part | Tiles)
    whole = size.size if is_split else size
    whole = num_ranks if whole == NUM_RANKS else number(whole, sizes)
    if not is_split:
        return whole
    if isinstance(size, Tiles):
        return -(-full_part(whole, num_ranks) // size.height) * size.height
    first, end = part_of(whole, rank, num_ranks)
    return end - first
