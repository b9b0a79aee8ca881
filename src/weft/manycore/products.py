"""A matrix product: its tiles placed on cores, the order of its loops, what it transfers.

    y[m, n] = x[m, k] @ w[k, n]      core (r, c) of the grid has tiles r, r + GRID_M, ... of the
                                     rows and c, c + GRID_N, ... of the columns

Rows that are gathered meanwhile are awaited shard by shard, own ones first; sums that other ranks
own are sent tile by tile, own ones last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from weft.base.errors import UnsupportedError
from weft.base.parts import full_part
from weft.manycore import nest
from weft.manycore.nest import Choices
from weft.manycore.record import Machine
from weft.manycore.scratchpad import Map, Request, allocate
from weft.manycore.signals import Ready, Summands
from weft.manycore.traffic import Pipeline, Traffic, block, fewest
from weft.manycore.values import Extent, Value, View

TILES_M, TILES_N, TILES_K = (4, 8, 16, 32, 64), (16, 32, 64, 128), (16, 32, 64, 128, 256, 512)
ORDERS = ("mnk", "nmk")
FLOPS_PER_STORE = 1  # of an element that is rounded and stored


@dataclass(frozen=True)
class Product:
    """`awaits`: signals at its begin; `gathered`: of the rows of x, shard by shard. `sums`: where
    tiles go that other ranks own; else they go to `out`."""

    name: str
    text: str
    x: View
    w: View
    out: Value | None
    machine: Machine
    choices: Choices
    tile: tuple[int, int, int]
    grid: tuple[int, int]
    order: str
    awaits: tuple[Ready, ...] = ()
    gathered: Ready | None = None
    sums: Summands | None = None

    kind = "product"

    @property
    def m(self) -> Extent:
        return self.x.num_rows

    @property
    def n(self) -> Extent:
        return self.w.columns

    @property
    def k(self) -> Extent:
        return self.x.columns

    @property
    def slots(self) -> int:
        return 2 if self.choices.double_buffer else 1

    def counts(self, rank: int) -> tuple[int, int, int]:
        """Tiles of rows, columns and k; of an empty sum there is one, of zeros."""
        sizes = (one.on(rank) for one in (self.m, self.n, self.k))
        m, n, k = (-(-size // tile) for size, tile in zip(sizes, self.tile))
        return m, n, max(k, 1)

    @property
    def active(self) -> int:
        m, n, _ = self.counts(0)
        return max(min(self.grid[0], m) * min(self.grid[1], n), 1)

    @cached_property
    def map(self) -> Map | None:
        return allocate(self.requests(), self.machine)

    def requests(self) -> list[Request]:
        tile_m, tile_n, tile_k = self.tile
        size, aligned = self.x.value.itemsize, self.machine.aligned
        return [
            Request(f"{self.x.name}_tile", tile_m, aligned(tile_k * size), self.slots),
            Request(f"{self.w.name}_tile", tile_k, aligned(tile_n * size), self.slots),
            Request("sums", tile_m, tile_n * 4),
            Request("out_tile", tile_m, aligned(tile_n * size), self.slots),
        ]

    # ---------------------------------------------------------------------------------------------
    # What it transfers

    def pipeline(self, rank: int, row: int, column: int, turned: bool = True) -> Pipeline:
        """Of the core at this place of the grid; not `turned`, as if tiles began with the first,
        where no core has more than the first one."""
        tiles_m, tiles_n, tiles_k = self.counts(rank)
        mine = [*range(row, tiles_m, self.grid[0])], [*range(column, tiles_n, self.grid[1])]
        if turned and self.first_tile(rank):
            mine = [(i + self.first_tile(rank)) % tiles_m for i in mine[0]], mine[1]
        m, n, k = (one.on(rank) for one in (self.m, self.n, self.k))
        counts = {"m": len(mine[0]), "n": len(mine[1]), "k": tiles_k}
        steps = counts["m"] * counts["n"] * tiles_k
        if not steps:
            return Pipeline(0, 0, 0, 0.0, Traffic(), Traffic(), Traffic())
        rows = [min(self.tile[0], m - i * self.tile[0]) for i in mine[0]]
        columns = [(i * self.tile[1], min(self.tile[1], n - i * self.tile[1])) for i in mine[1]]
        depths = [(i * self.tile[2], min(self.tile[2], k - i * self.tile[2]))
                  for i in range(tiles_k)]  # fmt: skip
        is_hoisted = self.choices.choose_order
        x_times = nest.times(self.order, "mk", counts, is_hoisted)
        w_times = nest.times(self.order, "nk", counts, is_hoisted)
        x = self._tiles("x", rows, depths)
        w = self._tiles("w", [depth for _, depth in depths], columns)
        got = _times(x, x_times, counts["m"] * tiles_k) + _times(w, w_times, counts["n"] * tiles_k)
        put = Traffic()
        if self.sums is None:
            put = self._tiles("out", rows, columns)
        num = sum(rows) * sum(width for _, width in columns)
        flops = 2 * num * k + FLOPS_PER_STORE * num
        fetches = steps if steps in (x_times, w_times) else max(x_times, w_times)
        first = self._tiles("x", rows[:1], depths[:1])
        first += self._tiles("w", [depths[0][1]], columns[:1])
        stores, ns = counts["m"] * counts["n"], flops / self.machine.gflops
        return Pipeline(steps, fetches, stores, ns, first, got, put)

    def first_tile(self, rank: int) -> int:
        """Rows in whose order a rank begins: own ones if they are gathered, its successor's if
        their sums are sent."""
        if self.gathered is None and self.sums is None:
            return 0
        size, num_ranks = self.m.size, (self.gathered or self.sums).num_ranks  # type: ignore
        each, tiles = full_part(size, num_ranks), self.counts(rank)[0]
        first = -(-min((rank + (self.sums is not None)) * each, size) // self.tile[0])
        return first % tiles if tiles else 0

    def _tiles(self, name: str, rows: list[int], columns: list[tuple[int, int]]) -> Traffic:
        """Each tile of so many rows and of columns (first, number), once."""
        of = {"x": self.x, "w": self.w}.get(name)
        value = of.value if of else self.out
        assert value is not None
        size, by_rows = value.itemsize, not self.choices.coalesce
        width = self.tile[2] if name == "x" else self.tile[1]
        pitches = value.pitch, self.machine.aligned(width * size)
        found = Traffic()
        starts = Counter(
            ((of.first_byte(first) if of else first * size) % self.machine.dma_align, number)
            for first, number in columns
        )
        for num_rows, num_blocks in Counter(rows).items():
            for (start, number), times in starts.items():
                one = block(self.machine, num_rows, start, number * size, pitches, by_rows)
                found += one * (num_blocks * times)
        return found

    def traffic(self, rank: int) -> Traffic:
        """Of all cores, its sends included."""
        found = Traffic()
        for row in range(self.grid[0]):
            for column in range(self.grid[1]):
                one = self.pipeline(rank, row, column)
                found += one.got + one.put
        return found + (self.sums.traffic(self, rank) if self.sums else Traffic())

    def ns(self, rank: int = 0) -> float:
        """From its begin to the barrier behind it, of its busiest core."""
        machine, active = self.machine, self.active
        one = self.pipeline(rank, 0, 0, turned=False)
        found = one.ns(machine, active, self.choices.double_buffer)
        least_ns = replace(one, steps=1, fetches=1, stores=1, got=one.first, put=Traffic(),
                           computed_ns=one.computed_ns / max(one.steps, 1))  # fmt: skip
        if self.sums:
            found = self._sent_ns(rank, found, one.stores)
        if self.gathered:
            least = least_ns.ns(machine, active, self.choices.double_buffer)
            found = self.gathered.behind(found, least + found / max(one.stores, 1))
        return found + machine.barrier_ns

    def _sent_ns(self, rank: int, ns: float, tiles: int) -> float:
        """With tiles that are sent: a buffer is free again once its tile has arrived."""
        assert self.sums is not None
        sent, machine = self.sums.traffic(self, rank), self.machine
        link_ns = (sent.sends / self.active * machine.dma_startup_ns
                   + sent.send_bytes / machine.link_gbps) / max(tiles, 1)  # fmt: skip
        turn_ns, reused = ns / max(tiles, 1), self.slots
        period_ns = max(turn_ns, link_ns, (link_ns + machine.link_latency_ns) / reused)
        if not self.choices.double_buffer:
            period_ns = turn_ns + link_ns + machine.link_latency_ns
        return turn_ns + period_ns * (tiles - 1) + link_ns + machine.link_latency_ns


def _times(traffic: Traffic, times: int, tiles: int) -> Traffic:
    """Each of the tiles as often as its share of `times` says."""
    return traffic * (times // tiles) if times >= tiles else traffic


def placed(first: Product) -> Product:
    """The same product with the tiles, grid and order of loops that are predicted to end first;
    of those that end nearly as early, with the fewest transfers.

    Raises  UnsupportedError: no tiles fit the scratchpad
    """
    found = [*_candidates(first)]
    if not found:
        machine = first.machine
        raise UnsupportedError(
            f"{first.name}: no tiles of {first.text} fit a scratchpad of "
            f"{machine.scratchpad_bytes} bytes; take a machine with a larger one"
        )
    return fewest(found, lambda one: one.pipeline(0, 0, 0, turned=False).got.transfers)


def _candidates(first: Product) -> Iterator[Product]:
    m, n, k = first.m.most, first.n.most, first.k.most
    for tile_m in _up_to(TILES_M, m):
        for tile_n in _up_to(TILES_N, n):
            for tile_k in _up_to(TILES_K, k):
                tile = (tile_m, tile_n, tile_k)
                one = replace(first, tile=tile)
                if one.map is None:
                    continue
                for grid in grids(first.machine.cores):
                    yield _ordered(replace(one, grid=grid))


def _up_to(tiles: tuple[int, ...], size: int) -> list[int]:
    """Those that are smaller than twice the size."""
    return [one for one in tiles if one < 2 * size] or [tiles[0]]


def grids(cores: int) -> Iterator[tuple[int, int]]:
    yield from ((one, cores // one) for one in range(1, cores + 1) if cores % one == 0)


def _ordered(one: Product) -> Product:
    """With the order of loops that has the fewest transfers; the order as written if that is no
    choice of the compiler's."""
    if not one.choices.choose_order:
        return replace(one, order=ORDERS[0])
    tiles_m, tiles_n, tiles_k = one.counts(0)
    turns = zip("mnk", (-(-tiles_m // one.grid[0]), -(-tiles_n // one.grid[1]), tiles_k))
    counts = dict(turns)

    def transfers(order: str) -> int:
        return nest.times(order, "mk", counts) + nest.times(order, "nk", counts)

    return replace(one, order=min(ORDERS, key=transfers))
