"""What a plan's buffers and launches come to at given sizes: extents, tiles, who has which.

Nothing of this knows of time; `predicted.py` plays it through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import ceil
from typing import Any, NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.errors import UsageError
from weft.base.hardware import Hardware
from weft.base.parts import part_of
from weft.compiler.passes.allocate import extent_of
from weft.ir.device import Buffer, Channel, Launch, Part, Plan
from weft.language.mapping import as_python
from weft.tiles import hierarchy, swizzle

GROUP_M = 8


class Tile(NamedTuple):
    """The i_m-th of `rows` rows: of rank `owner`'s part, or of all where tiles may straddle."""

    name: str
    owner: int
    i_m: int
    i_n: int
    rows: int
    words: tuple[tuple[int, int], ...]  # (source, chunk) of rows that must arrive first


class Cut:
    """A plan at these sizes: `sizes` are those that a call knows, `nodes` the domains' ranks."""

    def __init__(
        self, plan: Plan, sizes: Mapping[str, int], num_ranks: int, machine: Hardware,
        nodes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        nodes = tuple(nodes) or (num_ranks,)
        self.node_of = [node for node, size in enumerate(nodes) for _ in range(size)]
        self.nodes = hierarchy.Nodes(num_ranks, num_ranks // len(nodes), num_ranks % len(nodes))
        self.plan, self.sizes, self.num_ranks, self.machine = plan, sizes, num_ranks, machine
        self.buffers: dict[str, Buffer] = {one.name: one for one in plan.of(Buffer)}
        self.channels: dict[str, Channel] = {one.name: one for one in plan.of(Channel)}
        self.cut: dict[tuple[int, str], list[Tile]] = {}

    # ---- sizes

    def size(self, size: int | str | Part, rank: int) -> int:
        try:
            return extent_of(size, self.sizes, rank, self.num_ranks)
        except KeyError as missing:
            raise UsageError(f"{self.plan.name}: the size {missing.args[0]} is not given") from None

    def extents(self, name: str, rank: int) -> list[int]:
        return [self.size(one, rank) for one in self.buffers[name].sizes]

    def itemsize(self, name: str) -> int:
        if self.buffers[name].role == "tables":
            return DTYPES["int32"].itemsize
        return DTYPES[self.buffers[name].dtype].itemsize

    def row_bytes(self, name: str) -> int:
        return self.extents(name, 0)[-1] * self.itemsize(name)

    def rows_of(self, channel: Channel, rank: int) -> int:
        return self.size(Part(channel.rows), rank)

    def number(self, chunks: int | str) -> int:
        return chunks if isinstance(chunks, int) else self.sizes.get(chunks, 1)

    # ---- ranks

    def peers(self, rank: int) -> list[int]:
        """In the order in which their rows are asked for."""
        return [(rank + hop) % self.num_ranks for hop in range(1, self.num_ranks)]

    def receivers(self, rank: int, step: Launch) -> list[int]:
        """In the order in which own rows are pushed to them."""
        if step.order != "hierarchical_gather":
            return self.peers(rank)[::-1]
        receiver = as_python(hierarchy.receiver)
        return [receiver(hop, rank, self.nodes) for hop in range(1, self.num_ranks)]

    def by_node(
        self, rank: int, step: Launch, num_m: int, num_n: int = 1, group_m: int = 1,
        rows: int = 1, tile_m: int = 1,
    ) -> Iterator[Any]:  # fmt: skip
        """Tiles of `tile_m` rows in the order by nodes; each rank has `rows`."""
        order = as_python(hierarchy.by_node)
        is_scatter = int(step.order == "hierarchical_scatter")
        args = hierarchy.Hierarchy(group_m, rank, rows, tile_m, is_scatter, self.nodes)
        return (order(i, num_m, num_n, args) for i in range(num_m * num_n))

    # ---- tiles

    def tiles(self, rank: int, step: Launch) -> list[Tile]:
        """In the kernel's order."""
        key = (rank, step.kernel)
        if key not in self.cut:
            self.cut[key] = self.cut_tiles(rank, step)
        return self.cut[key]

    def cut_tiles(self, rank: int, step: Launch) -> list[Tile]:
        m, n = self.extents_of(rank, step)
        tile_m, tile_n = step.tile[0], step.tile[1]
        num_n = ceil(n / tile_n) if n else 0
        if gathers := self.gathered_by(step):
            return self.gathered(rank, step, gathers, m, num_n)
        if parts := self.parts_of(step):
            return self.scattered(rank, step, tile_m, num_n, parts[0])
        rows = range(ceil(m / tile_m))
        return [Tile(f"tile {i}, {j}", rank, i, j, tile_m, ()) for i in rows for j in range(num_n)]

    def gathered_by(self, step: Launch) -> Channel | None:
        """What says that rows have come which the kernel reads."""
        awaited = (self.channels[name] for name in step.awaits)
        return next((one for one in awaited if one.buffer in step.reads and one.own), None)

    def parts_of(self, step: Launch) -> list[Channel]:
        """A kernel's channels, where its tiles are those of each rank's part."""
        own = [self.channels[name] for name in (*step.awaits, *step.announces)]
        return own if any(one.cuts == "part" for one in own) else []

    def extents_of(self, rank: int, step: Launch) -> tuple[int, int]:
        """Rows and columns that a kernel's tiles cut: of its product, or of what it writes."""
        if step.template == "gemm":
            left, right = step.body[0].operands
            return self.extents(left, rank)[0], self.extents(right, rank)[1]
        m, n = self.extents(step.writes[0], rank)
        return m, n

    def k_of(self, rank: int, step: Launch) -> int:
        return self.extents(step.body[0].operands[0], rank)[-1]

    def gathered(self, rank: int, step: Launch, channel: Channel, m: int, num_n: int) -> list[Tile]:
        """Own rows of tiles first, which need not arrive; the next rank's, and so on."""
        tile_m = step.tile[0]
        rows, num_m = max(1, self.rows_of(channel, 0)), ceil(m / tile_m)
        if not num_m:
            return []
        chunks = self.number(channel.chunks)
        chunk_rows = max(1, ceil(rows / chunks))
        own_first, own_end = part_of(m, rank, self.num_ranks)
        first = int(swizzle.first_to_gather.fn(own_first, own_end, tile_m, num_m))
        head = max(1, min(rows // tile_m, num_m))
        group_m = max(1, min(GROUP_M, rows // tile_m))
        words = [
            () if own_first <= begin and min(begin + tile_m, m) <= own_end
            else tuple(self.words(rank, begin, min(begin + tile_m, m), rows, chunk_rows, chunks))
            for begin in range(0, m, tile_m)
        ]  # fmt: skip
        order = (group_m, first, head)
        tiles = [swizzle.rotated.fn(i, num_m, num_n, order)[:2] for i in range(num_m * num_n)]
        if step.order == "hierarchical_gather":
            tiles = self.by_node(rank, step, num_m, num_n, group_m, rows, tile_m)
        return [
            Tile(f"tile {i}, {j}: rows of rank {owner}", owner, i, j, tile_m, words[i])
            for i, j in tiles
            for owner in [i * tile_m // rows]
        ]  # fmt: skip

    @staticmethod
    def words(
        rank: int, row: int, end: int, rows: int, chunk_rows: int, chunks: int
    ) -> Iterator[tuple[int, int]]:
        """(source, chunk) of rows row .. end - 1, own ones left out."""
        while row < end:
            source, inside = divmod(row, rows)
            chunk = min(inside // chunk_rows, chunks - 1)
            if source != rank:
                yield source, chunk
            row = source * rows + (rows if chunk == chunks - 1 else (chunk + 1) * chunk_rows)

    def scattered(
        self, rank: int, step: Launch, tile_m: int, num_n: int, channel: Channel
    ) -> list[Tile]:
        """The next rank's part first, the own one last; none straddles two parts."""
        tiles = []
        if step.template == "rows":  # a program takes many rows at once
            most = max(1, self.rows_of(channel, 0))
            tile_m = max(tile_m, ceil(most * self.num_ranks / self.machine.num_sms))
        owners = [*self.peers(rank), rank]
        if step.order == "hierarchical_scatter":
            owners = [at.i_m for at in self.by_node(rank, step, self.num_ranks)]
        chunks = self.column_chunks(channel) if self.tokens_of(step) else 1
        for owner, chunk in product(owners, range(chunks)):
            num_m = ceil(self.rows_of(channel, owner) / tile_m)
            each = ceil(num_n / chunks)
            columns = range(chunk * each, min((chunk + 1) * each, num_n))
            for group in range(0, num_m, GROUP_M):
                for j in columns:
                    for i in range(group, min(group + GROUP_M, num_m)):
                        name = f"tile {i}, {j} of rank {owner}’s part"
                        tiles.append(Tile(name, owner, i, j, tile_m, ()))
        return tiles

    # ---- chunks that engines carry

    def column_chunks(self, channel: Channel) -> int:
        """Words of a rank's part whose columns are in chunks."""
        return ceil(self.extents(channel.buffer, 0)[-1] / channel.columns) if channel.columns else 1

    def tiles_of_chunk(self, step: Launch, channel: Channel) -> int:
        """Columns of tiles that one word stands for."""
        columns = self.extents(channel.buffer, 0)[-1]
        return ceil(ceil(columns / step.tile[1]) / self.column_chunks(channel))

    def tokens_of(self, step: Launch) -> Channel | None:
        """Those that a kernel sets for an engine."""
        found = (self.channels[name] for name in step.announces)
        return next((one for one in found if one.to == "engine"), None)
