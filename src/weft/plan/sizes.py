"""A plan at the sizes of a call on one rank: how large buffers are, and how rows are split."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from weft.base import topology
from weft.compiler.passes import allocate
from weft.ir.device import Buffer, Channel, Part, Plan
from weft.language.mapping import StaticMapping
from weft.plan.plan_facts import PlanFacts


class SizedPlan:
    """Its buffers and channels by name, and what they come to here."""

    def __init__(self, world: Any, plan: Plan, sizes: Mapping[str, int]) -> None:
        self.world, self.plan, self.sizes = world, plan, dict(sizes)
        self.nodes = topology.sizes_of(world.backend.seats.nodes)
        self.facts = PlanFacts.of(plan)
        self.buffers, self.channels = self.facts.buffers, self.facts.channels
        # By name and rank: what a first call does asks for most of them several times.
        self._shapes: dict[tuple[str, int], tuple[int, ...]] = {}

    def shape(self, name: str, rank: int | None = None) -> tuple[int, ...]:
        """A buffer's extents on a rank; rank 0 has the fullest part of all."""
        key = name, self.world.rank if rank is None else rank
        found = self._shapes.get(key)
        if found is None:
            extents, ranks = self.buffers[name].sizes, self.world.num_ranks
            found = tuple([allocate.extent_of(one, self.sizes, key[1], ranks) for one in extents])
            self._shapes[key] = found
        return found

    def rows(self, channel: Channel) -> int:
        """Of all ranks, of which a channel announces some."""
        return allocate.extent_of(channel.rows, self.sizes, 0, self.world.num_ranks)

    def split(self, channel: Channel) -> StaticMapping:
        """How a channel's rows lie over ranks and chunks, which are of whole producer's tiles."""
        rows = self.rows(channel)
        chunks, step = channel.chunks if isinstance(channel.chunks, int) else 1, channel.push_rows
        split = StaticMapping.of(
            rows, self.world.num_ranks, chunks=chunks, tile_rows=channel.tile_rows
        )
        return split._replace(chunk_rows=ceil(split.chunk_rows / step) * step)

    def chunks_of(self, channel: Channel) -> int:
        """Of a part's columns."""
        columns = self.shape(channel.buffer)[-1]
        return ceil(columns / channel.columns) if channel.columns else 1


def columns_here(buffer: Buffer, between: tuple[int, int], num_ranks: int) -> tuple[int, int]:
    """Of some columns of a buffer those that each rank has: where columns are split over ranks, and
    these are those of one piece, this rank's part of the piece."""
    (first, end), is_split = between, isinstance(buffer.sizes[1], Part)
    return (first // num_ranks, end // num_ranks) if is_split else between
