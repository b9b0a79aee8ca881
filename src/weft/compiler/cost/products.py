"""When products end whose operands arrive, or whose sums leave, while they run.

A program does the tiles of an order one after the other, each when its rows have arrived; the last
round's are shared over k, as tiles/tile_scheduler.py deals them out. All of B is read from memory
once for each group of rows of tiles. What this must get right is which of several ways ends first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil

from weft.base.hardware import Hardware
from weft.base.parts import full_part
from weft.compiler.cost.rounds import Arrival, Rounds
from weft.ir.schedule import FEEDERS, RELAYS
from weft.tiles import gemm_sm90, multiply_sm90, tile_scheduler
from weft.tiles.blocking import Blocking

ITEMSIZE = 2
# What brings rows beside the product, none of whose programs does.
BESIDE = ("ce_push", "relay")
# Columns of a product that waits for its operands in shared memory.
THIN_REST = 32
# Of fewer rows, the template for Hopper takes so many times what is predicted of gathered ones,
# which is of many tiles: as read on 2 x H100, recorded, of four layers (1.3 to 1.6, 1.2 to 1.4, 1.1
# to 1.4 times; benchmarks/results/unfused_h100x2.json).
OF_FEW_ROWS = ((256, 1.6), (512, 1.35), (1024, 1.2))
# How long the last packets are under way once all weights are read: at most 16 rows, and more.
FEWEST_SUMMED, LAST_PACKETS_US, LAST_WIDE_PACKETS_US = 16, 1.0, 7.0
# Of products whose sums leave: rows of tiles, of all ranks' parts, that share columns of B.
TOGETHER = 16
# Of a grouped product: so little may be waited for in any case, since tokens may choose few
# experts, which then have many tiles.
PATIENCE = 0.02


@dataclass(frozen=True)
class Product:
    """[m, k] @ [k, n] on each rank, in tiles of (rows, columns, k).

    m is over all ranks, n and k of one. `itemsize`: bytes of an element; `group_m`: rows of tiles
    that share columns of B, `head` those over which no group reaches, or 0: a rank's own ones;
    `first_wave`: programs for each tile of those, in a round of their own, or 1.
    """

    m: int
    n: int
    k: int
    num_ranks: int
    tile: tuple[int, int, int]
    itemsize: int = ITEMSIZE
    group_m: int = 8
    num_nodes: int = 1
    head: int = 0
    first_wave: int = 1

    @cached_property
    def rows(self) -> int:
        """Of a full shard."""
        return max(1, full_part(self.m, self.num_ranks))

    @cached_property
    def tiles(self) -> tuple[int, int]:
        return ceil(self.m / self.tile[0]), ceil(self.n / self.tile[1])

    @cached_property
    def own_rows(self) -> int:
        """Rows of tiles over which no group reaches."""
        # Where no tile is one rank's alone, none can go first, and B is read once.
        num_m = self.tiles[0]
        return self.head or min(self.rows // self.tile[0], num_m) or max(1, num_m)

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(how many, rows of tiles of each) of the groups that share columns of B."""
        found, head = [], self.own_rows
        for rows in (head, self.tiles[0] - head):
            many, rest = divmod(rows, self.group_m)
            found += [(many, self.group_m), (int(rest > 0), rest)]
        return found

    @property
    def ranks_of_node(self) -> int:
        """Of the smaller ones, where nodes differ: each rank has a port to the other nodes."""
        return max(1, self.num_ranks // self.num_nodes)

    def first_tile(self, row: int) -> int:
        """Where a row of tiles first comes in the order: rows of a group share columns of B."""
        begin = 0 if row < self.own_rows else self.own_rows
        begin += (row - begin) // self.group_m * self.group_m
        return begin * self.tiles[1] + row - begin


def tile_us(product: Product, machine: Hardware) -> float:
    """One tile by one program, at least as long as its operands take from memory."""
    rows, columns, _ = product.tile
    flops = 2 * rows * columns * product.k
    return flops / machine.program_tflops * tile_cost(rows, columns, machine) / 1e6


def tile_cost(rows: int, columns: int, machine: Hardware) -> float:
    """How much longer a program's products take in such tiles than in wide ones."""
    # Small tiles leave tensor cores waiting for operands.
    slower = max(1.0, 64 / min(rows, 64) * 0.5)
    if columns <= 128:
        return machine.turns_cost * slower
    rest = columns - multiply_sm90.wide_columns(columns)
    cost = machine.thin_rest_cost if rest == THIN_REST else machine.rest_cost
    return (cost if rest else 1.0) * slower


def gathered_us(
    product: Product, machine: Hardware, engine: str, *, chunks: int = 1, num_programs: int = 0,
    pushers: int = 0,
) -> float:  # fmt: skip
    """All-gather of A's rows, then the product; from the call to its end.

    engine: ce_push, sm_push; to other nodes sm_put, relay. `num_programs`: of the product; 0: as
    many as there are SMs, but for one beside engines and for those that relay. `pushers`: its last
    ones, which store rows before they multiply; 0: all, where nothing beside the product does it.
    """
    is_beside = engine in BESIDE
    beside = RELAYS if engine == "relay" else int(is_beside)
    programs = num_programs or max(1, machine.num_sms - beside)
    pushers = RELAYS if engine == "relay" else min(pushers or programs, programs)
    arrived = _arrivals(product, machine, engine, chunks, pushers)
    late = (0, 0.0) if is_beside else (pushers, arrived[-1][0])
    end = multiply_us(product, machine, programs, arrived, *late)
    return end + reread_us(product, machine) + machine.end_us


def of_few_rows(m: int) -> float:
    """What predictions of gathered rows are to be multiplied by beside those of other kinds."""
    return next((times for rows, times in OF_FEW_ROWS if m < rows), 1.0)


def contracted_us(product: Product, machine: Hardware, engine: str, *, chunks: int = 1) -> float:
    """All-gather of rows that are summed over, [m, k]^T @ [m, n]: all programs multiply the rows of
    one chunk after the other as these arrive."""
    programs = machine.num_sms - 1
    by_rows = replace(product, tile=(1, *product.tile[1:]))
    each_us = row_us(product.n, product.k, product.tile, programs, machine)
    arrived = _arrivals(by_rows, machine, engine, chunks, programs)
    return max(us + each_us * (product.m - row) for us, row in arrived) + machine.end_us


def row_us(m: int, n: int, tile: Sequence[int], programs: int, machine: Hardware) -> float:
    """A row of what is summed over rows to [m, n], by all programs."""
    flops = 2 * m * n / (machine.program_tflops * programs)
    return flops * tile_cost(tile[0], tile[1], machine) / 1e6


def _arrivals(
    product: Product, machine: Hardware, engine: str, chunks: int, pushers: int
) -> list[tuple[float, int]]:
    """(us, row of tiles) from which on tiles wait for the rows that come then, own rows first."""
    rows, row_bytes = product.rows, product.k * product.itemsize
    found, tile_m = [(0.0, 0)], product.tile[0]
    if engine == "relay":
        gbps = min(machine.push_gbps, pushers * machine.pusher_gbps)
        near_us, far_us = relayed_us(product, machine, rows * row_bytes, gbps, chunks)
        near_rows = rows * product.ranks_of_node
        found.append((machine.push_us + near_us, rows // tile_m))
        if near_rows < product.m:
            found.append((machine.push_us + far_us, near_rows // tile_m))
        return found
    if engine != "ce_push":
        if rows < product.m:
            gbps = min(machine.push_gbps, pushers * machine.pusher_gbps)
            sent_us = _sent_us(product, machine, rows * row_bytes, gbps)
            found.append((machine.push_us + sent_us, rows // tile_m))
        return found
    chunk_rows = max(1, ceil(rows / chunks))
    copy_us = machine.copy_us + machine.word_us + chunk_rows * row_bytes / machine.copy_gbps / 1e3
    for hop in range(1, product.num_ranks):
        for chunk, row in enumerate(range(hop * rows, (hop + 1) * rows, chunk_rows)):
            if row < product.m:
                copies = (hop - 1) * chunks + chunk + 1
                found.append((machine.put_gate_us + copies * copy_us, row // tile_m))
    return found


def arrived_us(product: Product, machine: Hardware, engine: str, chunks: int) -> float:
    """When all rows of a gather are there; engine: feed, or relay in so many chunks."""
    pushers = RELAYS if engine == "relay" else FEEDERS
    return _arrivals(product, machine, engine, chunks, pushers)[-1][0]


def _sent_us(product: Product, machine: Hardware, part_bytes: float, near_gbps: float) -> float:
    """Until SMs have sent a part to each peer: near ones by NVLink, at the same time those of other
    nodes, each by itself, by the rank's own port."""
    near = product.ranks_of_node - 1
    far = product.num_ranks - 1 - near
    near_us = near * part_bytes / near_gbps / 1e3
    if not far:
        return near_us
    return max(near_us, machine.far_us + far * part_bytes / machine.far_gbps / 1e3)


def relayed_us(
    product: Product, machine: Hardware, part_bytes: float, near_gbps: float, chunks: int
) -> tuple[float, float]:
    """When all near ranks' rows are there, and all other nodes', of which each part came once by
    the port of the rank that passes it on, chunk by chunk beneath what comes behind it."""
    near, nodes = product.ranks_of_node - 1, product.num_nodes - 1
    each_us = part_bytes / near_gbps / 1e3
    came_us = machine.far_us + nodes * part_bytes / machine.far_gbps / 1e3
    stored_us = near * (1 + nodes) * each_us  # all that a rank stores in its node
    last_us = near * nodes * each_us / chunks + machine.signal_us
    return near * each_us, max(came_us, stored_us) + last_us


def multiply_us(
    product: Product, machine: Hardware, programs: int, arrivals: Sequence[tuple[float, int]] = (),
    late: int = 0, late_us: float = 0.0,
) -> float:  # fmt: skip
    """When the last tile is done, where a row of tiles may be multiplied from its arrival on, and
    the last `late` of the programs begin at `late_us`."""
    num_n, each_us = product.tiles[1], tile_us(product, machine)
    waves = _waves(*product.tiles, product.k, product.tile, programs, product.head * num_n,
                   product.first_wave)  # fmt: skip
    rounds = Rounds(waves, programs, each_us, machine.share_us, late, late_us)
    end = rounds.end_us([Arrival(us, product.first_tile(row)) for us, row in arrivals])
    start = max((us for us, row in arrivals if not row), default=0.0)
    return max(end, start + _memory_us(product, machine))


@lru_cache
def _waves(
    num_m: int, num_n: int, k: int, tile: tuple[int, int, int], programs: int, early: int,
    first_wave: int,
) -> tile_scheduler.Waves:  # fmt: skip
    extents = (num_m * tile[0], num_n * tile[1], k)
    blocking = Blocking(*tile, gemm_sm90.NUM_WARPS, 1)
    return tile_scheduler.waves_of(*extents, blocking, programs, early, first_wave)


def _memory_us(product: Product, machine: Hardware) -> float:
    """Reading B, again for each group of rows of tiles if it does not stay in L2."""
    b_bytes = product.n * product.k * product.itemsize
    times = sum(many for many, _ in product.groups) if b_bytes > machine.cached_bytes else 1
    return b_bytes * times / machine.memory_gbps / 1e3


def reread_us(product: Product, machine: Hardware) -> float:
    """What products lose to readings of B for few rows each, if it does not stay in L2."""
    b_bytes, times = product.n * product.k * product.itemsize, 0.0
    if b_bytes <= machine.cached_bytes:
        return 0.0
    for many, rows in product.groups:
        times += many * max(0.0, 1 - rows * product.tile[0] / machine.many_rows)
    return b_bytes * times / machine.reread_gbps / 1e3


def grouped_us(slots: int, n: int, k: int, experts: int, itemsize: int, machine: Hardware) -> float:
    """A grouped product: of `slots` rows, or reading all experts' matrices if that is longer."""
    return max(_flops_us(slots * n * k, machine), _read_us(experts * n * k * itemsize, machine))


def _flops_us(cells: int, machine: Hardware) -> float:
    """As many products and sums, by all SMs."""
    return 2e-6 * cells / (machine.program_tflops * machine.num_sms)


def _read_us(num_bytes: float, machine: Hardware) -> float:
    return num_bytes / machine.memory_gbps / 1e3


def is_read_once(
    slots: int, tokens: int, product: tuple[int, int, int], tile_m: int, num_ranks: int,
    itemsize: int, machine: Hardware, arrived_us: float | None = None,
) -> bool:  # fmt: skip
    """Is it worth waiting for all tokens, so that tiles of one expert come together and read its
    matrix once? As tokens arrive, tiles of each rank's read it. product: experts, n, k;
    arrived_us: when they are there, by default as copy engines of one node bring them"""
    experts, n, k = product
    work_us = _flops_us(slots * n * k, machine)
    matrices_us = _read_us(experts * n * k * itemsize, machine)
    # An expert's last tile is half full on average.
    times = min(num_ranks, max(1.0, slots / (experts * tile_m) + 0.5))
    if arrived_us is None:
        of_peers = tokens * k * itemsize * (num_ranks - 1) // num_ranks
        arrived_us = machine.put_gate_us + of_peers / machine.copy_gbps / 1e3
    once, again = (_beside(work_us, many * matrices_us) for many in (1, times))
    return arrived_us < PATIENCE * once or arrived_us + once < again


def _beside(work_us: float, read_us: float) -> float:
    """Products and what they read, in each other's way: as read on 2 x H100."""
    return (work_us**1.5 + read_us**1.5) ** (2 / 3)


def _summed_us(product: Product, machine: Hardware, programs: int, rows: int) -> float:
    """A product whose tiles come part by part, `rows` of tiles each: TOGETHER of these at a time
    share a reading of B, or as many as all programs have columns of."""
    alone_us = multiply_us(replace(product, group_m=product.tiles[0]), machine, programs)
    b_bytes = product.n * product.k * product.itemsize
    if b_bytes <= machine.cached_bytes:
        return alone_us
    num_m, num_n = product.tiles
    together = min(num_m, max(min(rows, TOGETHER), programs // num_n))
    readings = ceil(num_m / together)
    if product.tile[1] <= 128:  # which ask for more bytes at a time than wide ones
        few = max(0.0, 1 - together * product.tile[0] / machine.many_rows)
        alone_us += readings * few * b_bytes / machine.reread_gbps / 1e3
    return max(alone_us, readings * _read_us(b_bytes, machine))


def leaving_us(product: Product, machine: Hardware, by_tma: bool = False) -> float:
    """How long tiles on their way to other ranks hold up their programs' next products.

    Both consumers of a wide tile wait for it; of narrow ones, one multiplies meanwhile.
    """
    if product.num_ranks == 1:
        return 0.0
    (rows, columns, _), (num_m, num_n) = product.tile, product.tiles
    whole, width = machine.tma_leave_us if by_tma else machine.leave_us, 128
    if columns > 128:
        whole, width = machine.wide_tma_leave_us if by_tma else machine.wide_leave_us, 256
    held_us = whole * rows / 128 * columns / width
    leaving = (product.num_ranks - 1) / product.num_ranks * num_m * num_n
    return leaving / machine.num_sms * held_us + machine.sums_us


def combine_us(product: Product, machine: Hardware, gbps: float) -> float:
    """Other ranks' sums for own tiles, of which each program reads so much."""
    own_bytes = product.rows * product.n * product.itemsize * (product.num_ranks - 1)
    num_m, num_n = product.tiles
    return own_bytes / (gbps * min(machine.num_sms, num_m * num_n)) / 1e3


def scattered_us(
    product: Product, machine: Hardware, *, by_tma: bool = False, engine: str = "sm_push"
) -> float:
    """The product, then reduce-scatter of its rows: other ranks' tiles first, own ones last."""
    num_m, num_n = product.tiles
    is_relayed = engine == "relay"
    programs = machine.num_sms - RELAYS * is_relayed
    each = tile_us(product, machine)
    alone = _summed_us(product, machine, programs, product.tiles[0])
    alone += leaving_us(product, machine, by_tma)
    # The last tiles for others leave when own ones begin, and are needed when those end.
    sent_us = _shares_us(product, machine, engine)
    own_us = num_m / product.num_ranks * num_n * each / programs
    added_us = combine_us(product, machine, machine.combine_gbps)
    exposed = max(0.0, sent_us - (alone - own_us), machine.signal_us)
    return max(alone, alone - own_us + exposed) + added_us + machine.end_us


def _shares_us(product: Product, machine: Hardware, engine: str) -> float:
    """Until all ranks have others' shares of their rows, in tiles of the product."""
    part_bytes = product.m * product.n * product.itemsize / product.num_ranks
    if engine != "relay":
        return _sent_us(product, machine, part_bytes, machine.push_gbps) + machine.signal_us
    # Near ranks' tiles and what partners add up by NVLink; of other nodes' rows one sum.
    gbps = min(machine.push_gbps, RELAYS * machine.pusher_gbps)
    num_m, num_n = product.tiles
    near_us, far_us = relayed_us(product, machine, part_bytes, gbps, num_m * num_n)
    shares = product.ranks_of_node * (product.num_nodes - 1)
    added_us = shares * part_bytes / (RELAYS * machine.combine_gbps) / 1e3
    return max(near_us, far_us, added_us) + machine.signal_us


def scattered_rows_us(
    rows: Product, machine: Hardware, engine: str, read_bytes: float = 0.0
) -> float:
    """Rows of m tokens that are added up from so many bytes, then reduce-scatter: other ranks' rows
    first, own ones last. `rows` in tiles of whole rows; none is multiplied."""
    read_us = _read_us(read_bytes, machine)
    sent_us = max(_shares_us(rows, machine, engine), read_us * (1 - 1 / rows.num_ranks))
    shares = rows.num_ranks - 1
    if engine == "relay":
        shares = rows.ranks_of_node + rows.num_nodes - 2
    added_us = _read_us(shares * rows.rows * rows.n * rows.itemsize, machine)
    return machine.push_us + max(read_us, sent_us) + added_us + machine.end_us


def exchanged_us(product: Product, machine: Hardware) -> float:
    """The product, whose tiles go to who owns their columns, own ones last; then what has come is
    stored among them. The product is as shape_of_exchange says it."""
    alone = multiply_us(product, machine, machine.num_sms) + leaving_us(product, machine)
    if product.num_ranks == 1:
        return alone + machine.end_us
    part_bytes = product.rows * product.n * product.itemsize
    own_us = alone / product.num_ranks
    sent_us = _sent_us(product, machine, part_bytes, machine.push_gbps)
    arrived_us = max(alone - own_us, sent_us) + machine.signal_us
    unpacked_us = _read_us(2 * (product.num_ranks - 1) * part_bytes, machine)
    return max(alone, arrived_us) + unpacked_us + machine.end_us


# Of own rows, where engines bring the columns that other ranks have.
SLICED_CHUNKS = (1, 2, 4, 8)


def sliced_us(product: Product, machine: Hardware, engine: str, chunks: int) -> float:
    """All-to-all of the columns of A, then the product of own rows, m of this rank: it begins with
    own columns, and goes on when all ranks have sent theirs of a chunk of rows."""
    alone, peers = replace(product, num_ranks=1), product.num_ranks - 1
    is_beside = engine in BESIDE
    programs = max(1, machine.num_sms - is_beside)
    if not peers:
        return multiply_us(alone, machine, programs) + machine.end_us
    rows = ceil(product.m / chunks)
    of_peers = peers * rows * product.k * product.itemsize / product.num_ranks
    begun_us, each_us = machine.push_us, of_peers / machine.push_gbps / 1e3
    if is_beside:
        begun_us = machine.put_gate_us
        each_us = of_peers / machine.copy_gbps / 1e3 + peers * (machine.copy_us + machine.word_us)
    arrived = [(begun_us + (i + 1) * each_us, row // product.tile[0])
               for i, row in enumerate(range(0, product.m, rows))]  # fmt: skip
    late = (0, 0.0) if is_beside else (programs, arrived[-1][0])
    # Own columns of the first tiles are multiplied meanwhile.
    first_us, row = arrived[0]
    arrived[0] = max(0.0, first_us - tile_us(product, machine) / product.num_ranks), row
    return multiply_us(alone, machine, programs, arrived, *late) + machine.end_us


# Of a part's columns, where engines carry them.
STAGED_CHUNKS = (1, 2, 4)
# What the tiles of a launch wait for that comes right behind another one: with the last one's way
# out 6 us (decision 024).
FIRST_OPERANDS_US = 1.8


def staged_gbps(columns: int, machine: Hardware) -> float:
    """What a program reads of sums that engines have carried, in tiles of so many columns."""
    return machine.wide_sums_gbps if columns > 128 else machine.sums_gbps


def staged_us(product: Product, machine: Hardware, chunks: int) -> float:
    """The product, whose other rows copy engines carry: part by part, each in chunks of columns;
    own ones last, which wait for the same chunk of the others."""
    ranks = product.num_ranks
    alone = _summed_us(product, machine, machine.num_sms, ceil(product.rows / product.tile[0]))
    chunk_us, each = alone / ranks / chunks, tile_us(product, machine)
    of_others = product.tiles[0] * product.tiles[1] * (ranks - 1) / ranks
    chunk_bytes = product.rows * product.n * product.itemsize / chunks
    copy_us = machine.token_us + machine.copy_us + machine.word_us
    copy_us += chunk_bytes / machine.copy_gbps / 1e3
    arrived, at = [0.0], 0.0
    leaving = (ranks - 1) * chunks
    for chunk in range(1, leaving + 1):
        # Where rounds are few, all of a chunk is there only when its last one ends.
        rounds = ceil(of_others * chunk / leaving / machine.num_sms)
        made_us = max(chunk * chunk_us, min(rounds * each, alone))
        at = max(at, made_us + machine.gate_us) + copy_us
        arrived.append(at)
    is_wide = product.tile[1] > 128
    added_us = combine_us(product, machine, staged_gbps(product.tile[1], machine))
    end = alone * (ranks - 1) / ranks
    # A tile waits when it is multiplied, so a round of all programs is then behind them; what is
    # left of the chunk takes whole rounds.
    ahead = machine.num_sms * (1 if is_wide else 2)
    own = product.tiles[0] * product.tiles[1] / ranks / chunks
    left_us = ceil(max(0.0, own - ahead) / machine.num_sms) * each
    for last in arrived[-chunks:]:
        end = max(end + chunk_us, last + left_us) + added_us / chunks
    return end + machine.end_us


def in_parts_us(product: Product, machine: Hardware, chunks: int) -> float:
    """The same where each chunk of all other ranks' columns is a launch of its own, behind which
    copy engines carry it; own rows are the last launch."""
    ranks, is_wide = product.num_ranks, product.tile[1] > 128
    added_us = combine_us(product, machine, staged_gbps(product.tile[1], machine))
    own_us = parts_us(product, machine, 1, 1)
    if ranks == 1:
        return own_us + machine.end_us
    piece_us = parts_us(product, machine, ranks - 1, chunks)
    piece_us += machine.push_us + FIRST_OPERANDS_US + machine.end_us
    copies_us = machine.copy_us + machine.word_us
    copies_us += product.rows * product.n * product.itemsize / chunks / machine.copy_gbps / 1e3
    end, at, arrived = 0.0, 0.0, []
    for _ in range(chunks):
        end += piece_us
        at = max(at, end + machine.token_us) + (ranks - 1) * copies_us
        arrived.append(at)
    # A tile waits when it is multiplied: a round of all programs is behind them then.
    ahead = machine.num_sms * (1 if is_wide else 2)
    own = ceil(product.rows / product.tile[0]) * product.tiles[1] / chunks
    left_us = ceil(max(0.0, own - ahead) / machine.num_sms) * tile_us(product, machine)
    end += machine.push_us
    for last in arrived:
        end = max(end + own_us / chunks, last + left_us) + added_us / chunks
    return end + machine.end_us


def parts_us(product: Product, machine: Hardware, parts: int, chunks: int) -> float:
    """The tiles of a chunk of columns, and of so many ranks' parts of the rows."""
    columns = max(1, product.n // chunks)
    one = replace(product, m=parts * product.rows, n=columns, num_ranks=1)
    return _summed_us(one, machine, machine.num_sms, ceil(product.rows / product.tile[0]))


def reduced_us(
    product: Product, machine: Hardware, engine: str = "sm_push", *, by_tma: bool = False
) -> float:
    """The product, then the sum of it over ranks.

    sm_push: rows are summed by their owners, which send them on. one_shot_ll: each rank sums all
    rows; two_shot_ll: owners of tiles do.
    """
    if engine in ("one_shot_ll", "two_shot_ll"):
        programs, (num_m, num_n) = machine.num_sms, product.tiles
        each = tile_us(product, machine)
        # A tile's sum is shared by as many programs as there are.
        split = max(1, min(4, programs // max(1, num_m * num_n)))
        compute = ceil(num_m * num_n * split / programs) * each / split
        whole = product.m * product.n * product.itemsize
        times = product.num_ranks - 1
        if engine == "two_shot_ll":
            times = 2 * times / product.num_ranks
        moved = whole * times / machine.packet_gbps / 1e3
        last_us = LAST_PACKETS_US if product.m <= FEWEST_SUMMED else LAST_WIDE_PACKETS_US
        return max(compute, _memory_us(product, machine)) + machine.packet_us + moved + last_us
    own_us = product.tiles[0] / product.num_ranks * product.tiles[1]
    own_us *= tile_us(product, machine) / machine.num_sms
    summed_us = scattered_us(product, machine, by_tma=by_tma)
    return summed_us + max(0.0, back_us(product, machine) - own_us) + machine.signal_us


def back_us(product: Product, machine: Hardware) -> float:
    """Until all ranks have the sums that a rank's kernel sends them of its rows."""
    part_bytes = product.rows * product.n * product.itemsize
    return _sent_us(product, machine, part_bytes, machine.push_gbps) + machine.signal_us


def summed_rows_us(num_bytes: int, num_ranks: int, machine: Hardware, engine: str) -> float:
    """Rows summed over ranks and worked on; `num_bytes` are those of all rows.

    sm_push: to their owners, and back; two_shot_ll: likewise. one_shot_ll: to every other rank.
    """
    if engine == "one_shot_ll":
        return machine.packet_us + num_bytes * (num_ranks - 1) / machine.packet_gbps / 1e3
    part_bytes = num_bytes * (num_ranks - 1) / num_ranks
    if engine == "two_shot_ll":
        way_us = 2 * part_bytes / machine.packet_gbps / 1e3
        return machine.packet_us + machine.signal_us + way_us
    return machine.rows_us + 2 * part_bytes / machine.push_gbps / 1e3


# Above so many, rows are as many bytes of a program's loads as weights are.
FEWEST_ROWS = 32


def few_rows_us(product: Product, machine: Hardware, by_packets: bool) -> float:
    """All-gather of a few rows, then the product: reading B is what takes time."""
    weights = product.n * product.k * product.itemsize
    if not by_packets:
        return weights / machine.small_gbps / 1e3 + machine.small_us
    us = machine.few_us if product.m <= FEWEST_ROWS else machine.few_wide_us
    of_peers = product.rows * (product.num_ranks - 1) * product.k * product.itemsize
    return weights / machine.few_gbps / 1e3 + of_peers / machine.packet_gbps / 1e3 + us
