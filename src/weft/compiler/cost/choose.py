"""Which engine and which tiles a kernel gets: the pair that is predicted to end first.

Every pair that a target can run is predicted, the libraries beside them; what is taken is told with
the time of what is not. Where no machine was measured (base/hardware.py) nothing is predicted: the
first way is taken that needs no copy engine, and the choice says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.base.dtypes import DTYPES
from weft.base.hardware import Hardware, hardware_of
from weft.base.parts import full_part
from weft.base.target import Target
from weft.compiler.cost import libraries, products
from weft.compiler.cost.products import Product
from weft.compiler.facts import Facts
from weft.compiler.passes.tile import held_by, is_cut_whole, number
from weft.ir.core import wrong_tile
from weft.ir.schedule import EMULATED_RELAYS, relays_on
from weft.ir.task import (
    ENGINES,
    INSIDE,
    LL,
    Program,
    Task,
    are_alike,
    arrives,
    is_staged_by,
)
from weft.ir.tensor import ByExpert, Size
from weft.tiles import blocking, gemm_sm90

LIBRARY = "library"
# Of the sm90 template: those that the generic one can have too, and all.
PLAIN_CUTS = (gemm_sm90.WIDE, gemm_sm90.TURNS)
HOPPER_CUTS = (*PLAIN_CUTS, gemm_sm90.MIDDLE)
# What SMs carry by themselves, to ranks of the node and to others: that runs everywhere.
BY_STORES = ("sm_push", "relay", "sm_put")
# Below so many rows a sum over ranks is worth sending by packets at all.
PACKET_ROWS = 1024
# Up to so many rows a tile of 128 is mostly empty, and weights are what takes time; tiles then.
SMALL_TILE, SMALL_M = (16, 64, 128), 64
# From so many bytes of a shard on a second flag pays for its copy's start (there, at 32 MiB).
TWO_CHUNKS_BYTES = 24 << 20
# Of rows that SMs push, what one program stores to a rank, in a chunk of its own: one program
# stores 20 GB/s, all of them fill the links.
PUSHED_BYTES = 1 << 16
# Chunks of a rank's rows for each program that relays them, at most.
RELAYED_TURNS = 4


@dataclass(frozen=True)
class Way:
    """One way to run a kernel, and when it would end: None where nothing was measured."""

    engine: str
    tile: tuple[int, ...]
    chunks: int | str
    us: float | None


def ways(
    program: Program, products_of: Sequence[Task], collective: Task, facts: Facts
) -> list[Way]:
    """All ways to run products with a collective, the best first; libraries included.

    Several products of the same rows are reckoned with as one that is as wide as all of them.
    """
    product, shape = products_of[0], shape_together(program, products_of, facts)
    unfused = shape
    if collective.kind == "all_to_all":
        if not are_owned(collective, facts.num_ranks):
            return [Way(LIBRARY, (), 0, 0.0)]
        if not arrives(collective):
            shape = shape_of_exchange(collective, shape, facts)
    of_tiles = shape
    if collective.kind == "all_to_all" and arrives(collective):  # k in slices
        of_tiles = replace(shape, k=shape.k // facts.num_ranks)
    found = [
        Way(engine, tile, chunks, predicted_us(product, collective, replace(shape, tile=tile),
                                               engine, chunks, facts))
        for engine in engines_of(collective, shape, facts)
        if engine != "ce_parts" or not product.scaling  # scales are not cut in chunks
        for tile in tiles_of(product, collective, engine, of_tiles, facts)
        for chunks in chunks_of(collective, replace(shape, tile=tile), engine, facts)
    ]  # fmt: skip
    machine = hardware_of(facts.target)
    if facts.target.backend == "cuda" and 0 not in (shape.m, shape.n, shape.k):
        us = None
        if machine is not None:
            us = libraries.unfused_us(unfused, machine, collective.kind)
            if collective.kind == "all_to_all":
                us = libraries.product_us(unfused, machine)
                us += _exchange_us(collective, facts, machine)
        found.append(Way(LIBRARY, (), 0, us))
    return in_order(found)


def unmeasured(target: Target) -> str:
    """Why nothing is predicted there."""
    return f"nothing is predicted for {target.name}, of which no machine was measured"


def in_order(found: list[Way]) -> list[Way]:
    """The one first that ends first; of those that end together the one in fewer chunks. Where
    nothing was measured, what SMs store."""

    def key(way: Way) -> float:
        return float(way.engine not in BY_STORES) if way.us is None else way.us

    return sorted(found, key=key)


def grouped(program: Program, product: Task, collective: Task, facts: Facts) -> list[Way]:
    """The ways to run a grouped product, the usual one first: of what the device alone knows
    nothing is predicted, but of tokens and their sums between nodes when they are all there.

    Tiles are as high as an expert has rows on average, the same for all products by one table.
    """
    assert product.type is not None
    shape = shape_of(program, product, facts)
    if _is_missing(program, product, facts):
        return [Way(LIBRARY, (), 0, 0.0)]
    kind = program.task(product.operands[2]).type
    assert kind is not None
    experts = number(kind.sizes[2], facts.sizes)
    height = 1 << max(4, min(7, (shape.m // experts - 1).bit_length()))
    sizes = (height, max(shape.n, 1), max(shape.k, 1))
    cut = next(
        (one for one in blocking.candidates(*sizes, product.type.dtype, facts.target)
         if one.tile_m <= height), None,
    )  # fmt: skip
    tile = (height, cut.tile_n, cut.tile_k) if cut else (height, 64, 32)
    if collective.kind == "all_gather":
        is_near = facts.num_nodes == 1 and facts.num_ranks > 1
        engines = ("feed", "ce_push") if is_near else ("feed",)
        if is_relayed(facts.nodes, facts.target):
            us = {one: _tokens_us(program, product, one, facts) for one in ("relay", "feed")}
            return in_order([Way(one, tile, "tiles", us[one]) for one in us])
    else:
        # Sums that are relayed end their kernel.
        is_last = program.of_kernel(collective.kernel)[-1] is collective
        found = of_rows(collective, facts, shape.m if is_last else 0)
        if facts.num_nodes > 1:
            return [replace(way, tile=tile) for way in found]
        engines = tuple(way.engine for way in found)
    return [Way(engine, tile, "tiles", 0.0) for engine in engines]


def _tokens_of(program: Program, product: Task, facts: Facts) -> Product:
    """What a product would be of tokens as they come, each once."""
    kind = program.task(product.operands[2]).type
    assert kind is not None
    return replace(shape_of(program, product, facts), m=number(kind.sizes[0], facts.sizes))


def chunks_of_tokens(program: Program, product: Task, facts: Facts) -> int:
    """Into how many chunks a rank's tokens are cut that are relayed to a product by tables."""
    tokens = _tokens_of(program, product, facts)
    shard_bytes = tokens.rows * tokens.k * tokens.itemsize
    return relayed_chunks(tokens.rows, shard_bytes, facts.num_nodes, facts.target)


def _tokens_us(program: Program, product: Task, engine: str, facts: Facts) -> float | None:
    """When all tokens are there, relayed or put to every rank by some of the product's programs."""
    machine = hardware_of(facts.target)
    if machine is None:
        return None
    tokens, chunks = _tokens_of(program, product, facts), chunks_of_tokens(program, product, facts)
    return round(products.arrived_us(tokens, machine, engine, chunks), 3)


def is_read_once(program: Program, product: Task, facts: Facts) -> bool:
    """Does a grouped product of gathered tokens end first if it waits for all of them?"""
    machine, kind = hardware_of(facts.target), program.task(product.operands[2]).type
    assert product.type is not None and kind is not None
    if machine is None or facts.num_ranks == 1:
        return False
    tokens, _, experts = (number(size, facts.sizes) for size in kind.sizes)
    shape = shape_of(program, product, facts)
    slots, arrived_us = shape.m, None
    if facts.num_nodes > 1:
        gather = program.task(program.task(product.operands[0]).operands[0])
        arrived_us = _tokens_us(program, product, gather.engine, facts)
    if product.type.placement == ByExpert():
        slots, experts = slots // facts.num_ranks, max(1, experts // facts.num_ranks)
    return products.is_read_once(
        slots, tokens, (experts, shape.n, shape.k), product.tile[0], facts.num_ranks,
        shape.itemsize, machine, arrived_us,
    )  # fmt: skip


def of_rows(collective: Task, facts: Facts, slots: int = 0) -> list[Way]:
    """All ways to sum rows over ranks where they are worked on, the best first: by who owns them,
    or, few rows, by every rank. `slots`: the rows of a grouped product, if there are any, of which
    each is added up; then nothing is done to the sums."""
    assert collective.type is not None
    rows, columns = (number(size, facts.sizes) for size in collective.type.sizes)
    itemsize = DTYPES[collective.type.dtype].itemsize
    sizes = rows, columns, itemsize, slots
    return sums_of_rows(collective.kind, *sizes, facts.num_ranks, facts.nodes, facts.target)


def sums_of_rows(
    kind: str, m: int, n: int, itemsize: int, slots: int, num_ranks: int, nodes: Sequence[int],
    target: Target,
) -> list[Way]:  # fmt: skip
    """The same of m rows of n elements, to their owners or to every rank."""
    engines: tuple[str, ...] = ("sm_push",)
    if len(nodes) > 1:
        engines = ("relay", "sm_put") if slots and is_relayed(nodes, target) else ("sm_put",)
    elif kind == "all_reduce" and m <= PACKET_ROWS:
        engines = ("sm_push", *LL)
    machine = hardware_of(target)
    if len(engines) == 1 or num_ranks == 1:
        return [Way(engines[0], (), "tiles", 0.0)]
    if machine is None:
        return [Way(one, (), "tiles", None) for one in engines]
    rows = Product(m, n, 1, num_ranks, (1, max(1, n), 1), itemsize, num_nodes=max(1, len(nodes)))
    read_bytes = slots * n * itemsize
    return in_order([Way(one, (), "tiles", _rows_us(kind, rows, one, read_bytes, machine))
                     for one in engines])  # fmt: skip


def _rows_us(kind: str, rows: Product, engine: str, read_bytes: int, machine: Hardware) -> float:
    """When rows are summed over ranks."""
    if rows.num_nodes == 1:
        num_bytes = rows.m * rows.n * rows.itemsize
        return products.summed_rows_us(num_bytes, rows.num_ranks, machine, engine)
    us = products.scattered_rows_us(rows, machine, engine, read_bytes)
    if kind == "all_reduce":
        us += _back_us(rows, machine) if engine == "relay" else products.back_us(rows, machine)
    return round(us, 3)


def _is_missing(program: Program, product: Task, facts: Facts) -> bool:
    """Has the last rank no part of the product? It would wait for nobody."""
    kinds = (product.type, program.task(product.operands[0]).type)
    last = facts.num_ranks - 1
    held = [held_by(kind, last, facts.sizes, facts.num_ranks) for kind in kinds if kind]
    return any(one.first_column >= one.end_column for one in held)


def engines_of(collective: Task, shape: Product, facts: Facts) -> Iterator[str]:
    """What can carry a collective there."""
    for engine in ENGINES[collective.kind]:
        is_far = facts.num_nodes > 1
        if collective.kind == "all_gather" and engine in INSIDE:
            continue  # of rows that tiles read by index; others an operator's schedule asks for
        if engine == "relay" and not is_relayed(facts.nodes, facts.target):
            continue  # nobody to pass rows on to, or no SM that would
        if (engine in ("sm_put", "relay")) != is_far:
            continue  # stores and copies reach one domain; puts are for others
        by_copies = engine in ("ce_push", "ce_parts")
        if not arrives(collective):
            if engine == "ce_push" and (facts.is_recorded or collective.kind == "all_to_all"):
                continue  # of a graph's branches none is sure to begin before another
        elif by_copies and (facts.num_ranks == 1 or facts.target.num_sms < 2):
            continue  # nothing to copy, or no SM for what waits beside the product
        if engine in LL and shape.m > PACKET_ROWS:
            continue
        yield engine


def is_relayed(nodes: Sequence[int], target: Target) -> bool:
    """Are there far rows, and near ranks to pass them on to, by SMs that the product can spare?"""
    return len(nodes) > 1 and max(nodes) > 1 and target.num_sms > relays_on(target)


def tiles_of(
    product: Task, collective: Task, engine: str, shape: Product, facts: Facts
) -> Iterator[tuple[int, ...]]:
    """Extents worth trying, that the target can run and the kernel's template takes."""
    for tile in _worth_trying(product, collective, engine, shape, facts):
        if not wrong_tile("gemm", tile, is_static=True):
            yield tile


def _worth_trying(
    product: Task, collective: Task, engine: str, shape: Product, facts: Facts
) -> Iterator[tuple[int, ...]]:
    assert product.type is not None
    if engine in LL and facts.target.backend != "emu":
        yield SMALL_TILE
        return
    dtype = product.type.dtype
    if product.kind == "matmul_tn":
        held = held_by(product.type, 0, facts.sizes, facts.num_ranks).extents
        m, n, k = (max(size, 1) for size in (*held, shape.m))
        rows = k if facts.target.backend == "emu" else m
        cut = next(blocking.candidates(m, n, rows, dtype, facts.target))
        yield cut.tile_m, cut.tile_n, cut.tile_k
        return
    # TMA reads whole steps of k, of which slices have some.
    is_even = (
        collective.kind != "all_to_all"
        or collective.dim == 1
        or shape.k % gemm_sm90.WIDE.tile_k == 0
    )
    if is_even and _is_for_hopper(shape, facts):
        # The generic variant has a power of two of columns. It runs over several nodes, and where
        # ranks signal tiles to each other it must be able to stand in.
        is_whole = arrives(collective) or is_cut_whole([product.kind, collective.kind])
        for cut in HOPPER_CUTS if facts.num_nodes == 1 and is_whole else PLAIN_CUTS:
            yield cut.tile_m, cut.tile_n, cut.tile_k
        return
    sizes = (max(shape.m, 1), max(shape.n, 1), max(shape.k, 1))
    cut = next(blocking.candidates(*sizes, dtype, facts.target))
    yield cut.tile_m, cut.tile_n, cut.tile_k


def _is_for_hopper(shape: Product, facts: Facts) -> bool:
    """Does the template for Hopper multiply it there?"""
    row_bytes = [extent * shape.itemsize for extent in (shape.n, shape.k)]
    is_hopper = facts.target.arch == 90 and shape.itemsize == 2
    return is_hopper and shape.m > SMALL_M and blocking.can_use_tma(facts.target, row_bytes)


def shape_together(program: Program, products_of: Sequence[Task], facts: Facts) -> Product:
    """That of one product that is as wide as all of these."""
    shape = shape_of(program, products_of[0], facts)
    return replace(shape, n=sum(shape_of(program, one, facts).n for one in products_of))


def is_read(
    program: Program, products_of: Sequence[Task], collective: Task, way: Way, facts: Facts
) -> bool:
    """Were times like this one read? What engines carry of sums, of the template for Hopper alone:
    elsewhere it has to be asked for, as among one rank."""
    if not is_staged_by(collective.kind, way.engine):
        return True
    shape = shape_together(program, products_of, facts)
    return facts.num_ranks > 1 and _is_for_hopper(shape, facts)


def chunks_of(collective: Task, shape: Product, engine: str, facts: Facts) -> Iterator[int | str]:
    """Signal words of a rank's rows; sums have one for each tile, or for each chunk of columns that
    an engine carries."""
    if is_staged_by(collective.kind, engine):
        assert collective.type is not None
        yield from staged_chunks(collective.type.sizes[1], shape.tile[1], engine)
        return
    if not arrives(collective):
        yield "tiles"
        return
    rows = shape.rows
    shard_bytes = rows * shape.k * shape.itemsize
    if collective.kind == "all_to_all":
        # Of own rows what one rank sends.
        rows, shard_bytes = shape.m, shape.m * shape.k * shape.itemsize // facts.num_ranks
        if engine == "ce_push":
            yield from (one for one in products.SLICED_CHUNKS if one == 1 or one * 128 <= rows)
            return
    if engine == "relay":
        yield relayed_chunks(shape.rows, shard_bytes, facts.num_nodes, facts.target)
        return
    if engine == "sm_push":
        most = min(facts.target.num_sms // facts.num_ranks, rows, shard_bytes // PUSHED_BYTES)
        yield max(1, most)
        return
    yield from range(1, 1 + (most_chunks(shard_bytes, facts.target) if engine == "ce_push" else 1))


def relayed_chunks(rows: int, shard_bytes: int, num_nodes: int, target: Target) -> int:
    """Of a rank's rows that are relayed: a few for each program, so that one is passed on while the
    next one comes, from the same rank or from that of another node; none too small for its
    signals."""
    if target.backend == "emu":
        return max(1, min(rows, EMULATED_RELAYS + 1))
    turns = max(1, RELAYED_TURNS // max(1, num_nodes - 1))
    return max(1, min(rows, shard_bytes // PUSHED_BYTES, turns * relays_on(target)))


def most_chunks(shard_bytes: int, target: Target) -> int:
    """Of rows that copy engines bring."""
    return 2 if shard_bytes >= TWO_CHUNKS_BYTES or target.backend == "emu" else 1


def staged_chunks(columns: Size, tile_n: int, engine: str = "ce_push") -> Iterator[int]:
    """Into how many chunks a part's columns may be cut: several are alike, of whole tiles, at all
    sizes of a class. Of launches that have one each two, where there can be: other numbers have
    other kernels, since Triton compiles in what they are divisible by."""
    found = [one for one in products.STAGED_CHUNKS if are_alike(columns, one, tile_n)]
    return iter(found[:2][-1:] if engine == "ce_parts" else found)


def predicted_us(
    product: Task, collective: Task, shape: Product, engine: str, chunks: int | str, facts: Facts
) -> float | None:
    """When the kernel would end, by the machine of the target; None where none was measured.

    To the nanosecond, so that ways that end together are found alike.
    """
    if 0 in (shape.m, shape.n, shape.k):
        return 0.0
    machine = hardware_of(facts.target)
    if machine is None:
        return None
    if collective.kind == "all_gather":
        assert isinstance(chunks, int)
        if product.kind == "matmul_tn":
            us = products.contracted_us(shape, machine, engine, chunks=chunks)
        else:
            us = products.gathered_us(shape, machine, engine, chunks=chunks)
            us *= products.of_few_rows(shape.m)
    elif is_staged_by(collective.kind, engine):
        assert isinstance(chunks, int)
        ends = products.staged_us if engine == "ce_push" else products.in_parts_us
        us = ends(shape, machine, chunks)
    elif engine == "relay":
        us = relayed_us(shape, machine, collective.kind)
    elif arrives(collective):
        assert isinstance(chunks, int)
        us = products.sliced_us(shape, machine, engine, chunks)
        us *= products.of_few_rows(shape.m)
    elif collective.kind == "all_to_all":
        us = products.exchanged_us(shape, machine) * products.of_few_rows(shape.rows)
    elif collective.kind == "reduce_scatter":
        us = products.scattered_us(shape, machine, engine=engine)
    else:
        us = products.reduced_us(shape, machine, engine)
    return round(us, 3)


def _exchange_us(collective: Task, facts: Facts, machine: Hardware) -> float:
    """By a library, with what it packs."""
    assert collective.type is not None
    rows, columns = (number(size, facts.sizes) for size in collective.type.sizes)
    num_bytes = full_part(rows, facts.num_ranks) * columns * DTYPES[collective.type.dtype].itemsize
    part_bytes, ranks = num_bytes / facts.num_ranks, (facts.num_ranks, facts.num_nodes)
    us = libraries.collective_us(collective.kind, part_bytes, num_bytes, *ranks, machine)
    return us + libraries.packed_us(num_bytes, facts.num_ranks, machine)


def are_owned(collective: Task, num_ranks: int) -> bool:
    """Has each rank as many columns as any other one, at all sizes of a class?"""
    assert collective.type is not None
    columns = collective.type.sizes[1]
    return isinstance(columns, int) and columns > 0 and columns % num_ranks == 0


def shape_of_exchange(collective: Task, shape: Product, facts: Facts) -> Product:
    """That of a product of own rows whose columns go to their owners, as its tiles are cut: of all
    ranks' rows, and of one rank's columns; which is as much work."""
    assert collective.type is not None
    rows = number(collective.type.sizes[0], facts.sizes)
    return replace(shape, m=rows, n=shape.n // facts.num_ranks)


def relayed_us(shape: Product, machine: Hardware, kind: str) -> float:
    """The product, whose sums are relayed between nodes; where all ranks get them, a library's
    gather behind it."""
    us = products.scattered_us(shape, machine, engine="relay")
    return us + _back_us(shape, machine) if kind == "all_reduce" else us


def _back_us(shape: Product, machine: Hardware) -> float:
    """A library's gather of what owners have summed."""
    row_bytes = shape.n * shape.itemsize
    sizes = shape.rows * row_bytes, shape.m * row_bytes
    return libraries.collective_us("all_gather", *sizes, shape.num_ranks, shape.num_nodes, machine)


def shape_of(program: Program, product: Task, facts: Facts) -> Product:
    """m, n and k of one rank, where shards are full; a fused product has the rows of all ranks. Of
    one that sums over these, k are the columns of what is gathered."""
    assert product.type is not None
    first = program.task(product.operands[0])
    assert first.type is not None
    held = held_by(product.type, 0, facts.sizes, facts.num_ranks)
    part = held_by(first.type, 0, facts.sizes, facts.num_ranks)
    (m, n), k = held.extents, part.end_column
    if product.kind == "matmul_tn":
        n, k = held.extents if first not in program.gathers(product) else held.extents[::-1]
        m = part.end_row
    itemsize = DTYPES[product.type.dtype].itemsize
    return Product(m, n, k, facts.num_ranks, (128, 128, 64), itemsize, num_nodes=facts.num_nodes)
