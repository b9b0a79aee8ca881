"""Attention of one tile size: a core has a head's block of queries and goes through keys and values
block by block, with the softmax of what it has seen so far."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.base.parts import part_of
from weft.manycore.nest import Choices
from weft.manycore.record import Machine
from weft.manycore.scratchpad import Map, Request, allocate
from weft.manycore.signals import Ready
from weft.manycore.traffic import Pipeline, Traffic, block
from weft.manycore.values import Extent, Value, View

TILE_Q = TILE_KV = 16
# Of a score beside its two products: the exponential and the softmax's bookkeeping.
FLOPS_PER_SCORE = 16


@dataclass(frozen=True)
class Attention:
    """`is_split`: ranks have their part of the queries' rows, and all keys."""

    name: str
    text: str
    q: View
    k: View
    v: View
    out: Value
    head: int
    causal: bool
    is_split: bool
    machine: Machine
    choices: Choices
    awaits: tuple[Ready, ...] = ()

    kind = "attention"

    @property
    def heads(self) -> Extent:
        """As many on every rank."""
        return Extent(self.q.columns.most // self.head)

    @property
    def group(self) -> int:
        return self.q.columns.most // self.k.columns.most

    @property
    def slots(self) -> int:
        return 2 if self.choices.double_buffer else 1

    @property
    def active(self) -> int:
        tiles = -(-self.q.num_rows.most // TILE_Q)
        return max(min(self.heads.most * tiles, self.machine.cores), 1)

    @cached_property
    def map(self) -> Map | None:
        size, aligned = self.q.value.itemsize, self.machine.aligned
        pitch = aligned(self.head * size)
        return allocate(
            [
                Request("q_tile", TILE_Q, pitch, 1 if self.choices.choose_order else self.slots),
                Request("k_tile", TILE_KV, pitch, self.slots),
                Request("v_tile", TILE_KV, pitch, self.slots),
                Request("sums", TILE_Q, self.head * 4),
                Request("scores", TILE_KV, 4),
                Request("softmax", TILE_Q, 8),
                Request("out_tile", TILE_Q, pitch),
            ],
            self.machine,
        )

    def jobs(self, rank: int, core: int) -> list[tuple[int, int, int]]:
        """(head, rows of the block, keys that it sees) of a core, in order."""
        rows, keys = self.q.num_rows.on(rank), self.k.num_rows.on(rank)
        tiles = -(-rows // TILE_Q)
        first = part_of(self.q.num_rows.size, rank, self.q.num_rows.num_ranks)[0]
        found = []
        for job in range(core, self.heads.most * tiles, self.machine.cores):
            i_q = job % tiles
            num = min(TILE_Q, rows - i_q * TILE_Q)
            seen = min(keys, (first if self.is_split else 0) + i_q * TILE_Q + num)
            found.append((job // tiles, num, seen if self.causal else keys))
        return found

    def pipelines(self, rank: int, core: int) -> list[Pipeline]:
        """One for each block of queries."""
        return [self._pipeline(*one) for one in self.jobs(rank, core)]

    def _pipeline(self, head: int, rows: int, keys: int) -> Pipeline:
        size, by_rows = self.q.value.itemsize, not self.choices.coalesce
        pitch = self.machine.aligned(self.head * size)
        steps = -(-keys // TILE_KV)

        def moved(view: View, column: int, num: int) -> Traffic:
            start = view.first_byte(column * self.head)
            pitches = view.value.pitch, pitch
            return block(self.machine, num, start, self.head * size, pitches, by_rows)

        got = moved(self.q, head, rows) * (1 if self.choices.choose_order else steps)
        first = moved(self.q, head, rows)
        for i in range(steps):
            num = min(TILE_KV, keys - i * TILE_KV)
            if i == 0:
                first += moved(self.k, head // self.group, num) * 2
            got += moved(self.k, head // self.group, num) + moved(self.v, head // self.group, num)
        out = View(self.out, self.out.columns)
        flops = rows * (keys * (4 * self.head + FLOPS_PER_SCORE) + self.head)
        ns = flops / self.machine.gflops
        return Pipeline(steps, steps, 1, ns, first, got, moved(out, head, rows))

    def traffic(self, rank: int) -> Traffic:
        found = Traffic()
        for core in range(self.machine.cores):
            for one in self.pipelines(rank, core):
                found += one.got + one.put
        return found

    def ns(self, rank: int = 0) -> float:
        is_double = self.choices.double_buffer
        core = max(
            sum(one.ns(self.machine, self.active, is_double) for one in self.pipelines(rank, core))
            for core in range(self.active)
        )
        waited = max((one.all_ns for one in self.awaits), default=0.0)
        return core + waited + self.machine.barrier_ns
