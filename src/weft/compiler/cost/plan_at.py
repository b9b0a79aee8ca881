"""A plan at the sizes of a call: extents on each rank, and in which order ranks come to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil, prod

from weft.base.dtypes import DTYPES
from weft.base.errors import UsageError
from weft.compiler.passes.allocate import extent_of
from weft.ir.device import Buffer, Call, Channel, Do, Launch, Part, Plan, Tiles
from weft.ir.kinds import GATHERED
from weft.ir.tensor import Size
from weft.language.mapping import as_python
from weft.tiles import hierarchy


def product_of(step: Launch) -> Do:
    """The product among what a launch does, if it does one."""
    return next(do for do in step.body if do.kind in GATHERED)


def brings_rows(step: Launch) -> bool:
    """Does the kernel that multiplies store own rows on the other ranks, too?"""
    return any(do.kind == "all_gather" for do in step.body) and step.template in ("gemm", "small")


class PlanAt:
    """Of all ranks."""

    def __init__(
        self, plan: Plan, sizes: Mapping[str, int], num_ranks: int, nodes: Sequence[int] = ()
    ) -> None:
        nodes = tuple(nodes) or (num_ranks,)
        self.node_of = [node for node, size in enumerate(nodes) for _ in range(size)]
        ends = [0, *accumulate(nodes)]
        self._ranks_of = [list(range(*one)) for one in pairwise(ends)]
        self.nodes = hierarchy.Nodes(num_ranks, num_ranks // len(nodes), num_ranks % len(nodes))
        self.plan, self.sizes, self.num_ranks = plan, sizes, num_ranks
        self.buffers: dict[str, Buffer] = {one.name: one for one in plan.of(Buffer)}
        self.channels: dict[str, Channel] = {one.name: one for one in plan.of(Channel)}

    def size(self, size: Size | Part | Tiles, rank: int) -> int:
        try:
            return extent_of(size, self.sizes, rank, self.num_ranks)
        except KeyError as missing:
            raise UsageError(f"{self.plan.name}: the size {missing.args[0]} is not given") from None

    def extents(self, name: str, rank: int) -> list[int]:
        return [self.size(one, rank) for one in self.buffers[name].sizes]

    def keys_seen(self, rank: int, step: Call) -> float:
        """By each of a rank's own queries, on average."""
        own, _ = self.extents(step.writes[0], rank)
        parts = [self.extents(step.reads[0], r)[0] for r in range(self.num_ranks)]
        is_split = isinstance(self.buffers[step.reads[0]].sizes[0], Part)
        if step.causal:
            return (sum(parts[:rank]) if is_split else 0) + own / 2
        return sum(parts) if is_split else own

    def itemsize(self, name: str) -> int:
        is_table = self.buffers[name].role == "tables"
        return DTYPES["int32" if is_table else self.buffers[name].dtype].itemsize

    def num_bytes(self, name: str, rank: int) -> int:
        return prod(self.extents(name, rank)) * self.itemsize(name)

    def row_bytes(self, name: str) -> int:
        return self.extents(name, 0)[-1] * self.itemsize(name)

    def rows_of(self, channel: Channel, rank: int) -> int:
        return self.size(Part(channel.rows), rank)

    def chunks_of(self, channel: Channel) -> int:
        """Signal words of a rank's part: of chunks of its rows, or of its columns."""
        if channel.columns:
            return ceil(self.extents(channel.buffer, 0)[-1] / channel.columns)
        chunks = channel.chunks
        return chunks if isinstance(chunks, int) else self.sizes.get(chunks, 1)

    def peers(self, rank: int) -> list[int]:
        """In the order in which their rows are asked for."""
        return [(rank + hop) % self.num_ranks for hop in range(1, self.num_ranks)]

    def receivers(self, rank: int, step: Launch) -> list[int]:
        """In the order in which own rows are pushed to them."""
        if step.order != "hierarchical_gather":
            return self.peers(rank)[::-1]
        receiver = as_python(hierarchy.receiver)
        return [receiver(hop, rank, self.nodes) for hop in range(1, self.num_ranks)]

    def near(self, rank: int) -> list[int]:
        """The other ranks of its node."""
        return [peer for peer in self._ranks_of[self.node_of[rank]] if peer != rank]

    def partners(self, rank: int) -> list[int]:
        """Who passes its rows on, on each other node: as tiles/nodes.py says it."""
        return [there[self.seat(rank) % len(there)] for there in self._others(rank)]

    def partner_here(self, rank: int, shard: int) -> int:
        """Who adds up on a rank's node what a rank of another one gets; or that rank, if near."""
        there = self._ranks_of[self.node_of[rank]]
        return shard if shard in there else there[self.seat(shard) % len(there)]

    def relayed_by(self, rank: int) -> list[int]:
        """The ranks of other nodes whose rows it passes on."""
        seat, size = self.seat(rank), len(self._ranks_of[self.node_of[rank]])
        return [source for there in self._others(rank) for source in there[seat::size]]

    def seat(self, rank: int) -> int:
        """Its number in its node."""
        return rank - self._ranks_of[self.node_of[rank]][0]

    def _others(self, rank: int) -> list[list[int]]:
        """The ranks of each other node, the next one first."""
        node, count = self.node_of[rank], len(self._ranks_of)
        return [self._ranks_of[(node + hop) % count] for hop in range(1, count)]

    def owners(self, rank: int, step: Launch) -> list[int]:
        """Whose rows a kernel's tiles are of, in its order; only its own where ranks share none."""
        is_scatter = self.gathered_by(step) is None
        if is_scatter and not self.parts_of(step):
            return [rank]
        if step.order.startswith("hierarchical"):
            args = hierarchy.Hierarchy(1, rank, 1, 1, int(is_scatter), self.nodes)
            order = as_python(hierarchy.by_node)
            return [order(i, self.num_ranks, 1, args).i_m for i in range(self.num_ranks)]
        return [*self.peers(rank), rank] if is_scatter else [rank, *self.peers(rank)]

    def gathered_by(self, step: Launch) -> Channel | None:
        """What says that rows have come which the kernel reads."""
        awaited = (self.channels[name] for name in step.awaits)
        return next((one for one in awaited if one.buffer in step.reads and one.own), None)

    def parts_of(self, step: Launch) -> list[Channel]:
        """A kernel's channels, where its tiles are those of each rank's part."""
        own = [self.channels[name] for name in (*step.awaits, *step.announces)]
        return own if any(one.cuts == "part" for one in own) else []

    def tokens_of(self, step: Launch) -> Channel | None:
        """Those that a kernel sets for an engine."""
        found = (self.channels[name] for name in step.announces)
        return next((one for one in found if one.to == "engine"), None)

    def extents_of(self, rank: int, step: Launch) -> tuple[int, int]:
        """Rows and columns that a kernel's tiles cut: of its product, or of what it writes."""
        if step.template == "gemm":
            product = product_of(step)
            left, right = (self.extents(name, rank) for name in product.operands)
            return left[product.kind == "matmul_tn"], right[1]
        m, n = self.extents(step.writes[0], rank)
        if step.body and step.body[-1].kind == "reduce_scatter":  # of all ranks' rows
            m = self.size(self.parts_of(step)[0].rows, rank)
        return m, n
