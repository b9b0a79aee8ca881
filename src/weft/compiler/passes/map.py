"""Say of each collective over rows which range, on which rank, is announced on which signal word.

    g = all_gather(x, dim=0, chunks=2)    ->    g_ready = channel(g, m, chunks=2, tile_rows=128)

The mapping is static and affine (weft.language.mapping): rows lie over ranks as torch.chunk splits
them, each rank's part in chunks with a word each. Whoever produces cuts each rank's part into
tiles of its own height, whoever consumes cuts all rows (gather) or its own (scatter) into others;
nothing need divide. `check` shows for given sizes that the two views fit.

What a kernel sums over ranks lies in `partials`, whose tiles are those of the product, a word for
each at the rank that sums it; where engines carry them, from `kept`, a word for each chunk of
columns. What comes back lies in `gathered`, where its rows stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.base.counts import counted
from weft.base.errors import ConfigError
from weft.base.parts import full_part
from weft.compiler.passes.tile import number
from weft.ir.device import Channel, scales_of
from weft.ir.task import LL, Program, Task, is_carried
from weft.language import mapping

# Signal words per rank: 2, so that the first half is used while the second is on its way.
CHUNKS = 2
# Of all that is wrong with a mapping so much is told.
MOST_TOLD = 4


def map_rows(program: Program, chunks: int = CHUNKS) -> tuple[Channel, ...]:
    """The channels of a tiled program: of each collective over rows, of all that kernels do.

    Collectives that libraries do have one too where they work over rows, of `chunks` words for each
    rank: it is checked, not used.
    """
    channels: list[Channel] = []
    for task in program.tasks:
        if task.kernel and _is_grouped(program, task):
            channels.append(_of_tables(program, task))
        elif task.kernel and task.kind in ("reduce_scatter", "all_reduce"):
            channels += _of_sums(program, task)
        elif task.dim == 0:
            channels += _of_rows(program, task, task.chunks or chunks)
    return tuple(channels)


class Span(NamedTuple):
    """A tile's rows first .. end - 1, and the words word .. word + count - 1 that announce them."""

    first: int
    end: int
    word: int
    count: int


def check(channel: Channel, sizes: Mapping[str, int], num_ranks: int) -> None:
    """Raises  ConfigError: tiles that do not fit together, at these sizes. What tables say only the
    device knows: `check_tables`."""
    if channel.cuts == "experts":
        return
    produced, consumed = views(channel, sizes, num_ranks)
    f_count = mapping.as_python(mapping.f_count)
    view = _view(channel, sizes, num_ranks, is_producer=True)
    parts = 1 if channel.cuts == "each" else num_ranks
    full = [f_count(word, view) for word in range(parts * view.chunks)]
    if wrong := list(misfits(number(channel.rows, sizes), produced, consumed, full)):
        message = f"channel {channel.name} with {sizes} on {counted(num_ranks, 'rank')}"
        remedy = "until the mapping is put right, lowering='unfused' needs none at these sizes"
        raise ConfigError(f"{message}: {_listed(wrong)}; {remedy}", place=channel.place)


def check_tables(
    channel: Channel, tiles: Sequence[Sequence[int]], ranks_of: Sequence[int], num_ranks: int
) -> None:
    """As `check`, for tables as a router has made them.

    tiles: (expert, first, end, lo, hi) of each; ranks_of: whose token is in each slot.

    Raises  ConfigError: slots in no tile or in two; a tile with tokens of other ranks than it says
    """
    spans = [Span(first, end, 0, 1) for _, first, end, _, _ in tiles]
    wrong = list(misfits(len(ranks_of), spans, spans, [len(spans)]))
    for i, (_, first, end, lo, hi) in enumerate(tiles):
        there = sorted(set(ranks_of[first:end]))
        if there and not (lo == there[0] and hi == there[-1] and 0 <= lo and hi < num_ranks):
            message = f"tile {i}, slots {first} to {end - 1}, has tokens of ranks"
            wrong.append(
                f"{message} {', '.join(map(str, there))}, and waits for {lo} to {hi}: its lo must "
                f"be {there[0]} and its hi {there[-1]}"
            )
    if wrong:
        remedy = "weft.ops.moe_route makes tables that fit; of one's own the tiles must be these"
        raise ConfigError(
            f"channel {channel.name}: {_listed(wrong)}; {remedy}", place=channel.place
        )


def _listed(wrong: Sequence[str]) -> str:
    more = len(wrong) - MOST_TOLD
    return "; ".join([*wrong[:MOST_TOLD], *([f"and {more} more"] if more > 0 else [])])


def views(
    channel: Channel, sizes: Mapping[str, int], num_ranks: int
) -> tuple[list[Span], list[Span]]:
    """The producer's tiles and the consumer's, those without rows left out."""
    sides = (_view(channel, sizes, num_ranks, is_producer=side) for side in (True, False))
    produced, consumed = (list(_spans(side)) for side in sides)
    return produced, consumed


def misfits(
    rows: int, produced: Sequence[Span], consumed: Sequence[Span], full: Sequence[int]
) -> Iterator[str]:
    """What is wrong with a mapping, static or of tables: with the tiles' numbers and rows, and what
    would put it right.

    `full[word]` is how many of the producer's tiles make the word full.
    """
    for name, tiles in (("the producer's", produced), ("the consumer's", consumed)):
        at, last = 0, None
        for i in sorted(range(len(tiles)), key=lambda i: tiles[i].first):
            first, end = tiles[i].first, tiles[i].end
            if first > at:
                yield (
                    f"rows {at} to {first - 1} are in none of {name} tiles: let tile {i} begin at "
                    f"row {at}, or put one before it"
                )
            if first < at:
                yield (
                    f"{name} tiles {last} and {i} both have row {first}: let tile {i} begin at row "
                    f"{at}, or leave it out"
                )
            at, last = max(at, end), i
        if at != rows:
            yield f"{name} tiles end at row {at} of {rows}: the last one must end at row {rows}"
    given = [0] * len(full)
    for i, one in enumerate(produced):
        for word in range(one.word, one.word + one.count):
            if not 0 <= word < len(full):
                yield (
                    f"the producer's tile {i} announces word {word} of {len(full)}: it must be one "
                    f"of 0 to {len(full) - 1}"
                )
                continue
            given[word] += 1
    for word, (expected, there) in enumerate(zip(full, given)):
        if expected != there:
            yield (
                f"word {word} is full at {expected}, and {there} tiles announce it: let it be full "
                f"at {there}, or another number of tiles announce it"
            )
    for j, reader in enumerate(consumed):
        waits = range(reader.word, reader.word + reader.count)
        for i, writer in enumerate(produced):
            meets = max(reader.first, writer.first) < min(reader.end, writer.end)
            words = range(writer.word, writer.word + writer.count)
            # Of a tile that lies in several chunks every word says that all of it has come.
            if meets and not any(word in waits for word in words):
                yield (
                    f"the consumer's tile {j} reads rows of the producer's tile {i}, on words "
                    f"{words.start} to {words.stop - 1}, and waits for {waits.start} to "
                    f"{waits.stop - 1}: let it wait for one of those words too"
                )


def _of_rows(program: Program, task: Task, chunks: int | str) -> Iterator[Channel]:
    assert task.type is not None
    rows, name = task.type.sizes[0], f"{task.name}_ready"
    source = program.task(task.operands[0])
    if task.kind == "reduce_scatter":
        # Every rank sends its summand of each tile to whose part it is.
        push_rows = (source.tile or task.tile)[0]
        yield Channel(name, task.name, rows, chunks, push_rows, task.tile[0], "part", "num_ranks",
                      place=task.place)  # fmt: skip
        return
    heights = sorted({one.tile[0] for one in program.users(task.name)} or {task.tile[0]})
    if task.kernel:
        # Whoever carries the rows says of each chunk when all of it is there.
        if task.engine in LL:
            yield Channel(name, task.name, rows, tile_rows=heights[0], by="packet",
                          place=task.place)  # fmt: skip
            return
        is_scaled = any(one.scaling for one in program.users(task.name))
        yield Channel(
            name, task.name, rows, chunks, tile_rows=heights[0], own=source.name,
            along=(scales_of(task.name),) if is_scaled else (), place=task.place,
        )  # fmt: skip
        return
    for i, height in enumerate(heights):
        unique = f"{name}_{i}" if i else name
        yield Channel(unique, task.name, rows, chunks, task.tile[0], height, place=task.place)


def _is_grouped(program: Program, task: Task) -> bool:
    """Are its rows those of a product's tiles as tables say, which the device alone knows?"""
    if task.kind == "all_gather":
        return any(one.kind == "gather_rows" for one in program.users(task.name))
    return task.kind == "reduce_scatter" and program.chief(task.kernel).kind == "grouped_matmul"


def _of_tables(program: Program, task: Task) -> Channel:
    """Of tokens on their way to all ranks, by whom they are fed; or of weighted rows on their way
    back, a word for each tile and source."""
    assert task.type is not None
    rows = task.type.sizes[0]
    if task.kind == "all_gather":
        (reader,) = program.users(task.name)
        chief, chunks = program.chief(reader.kernel), task.chunks
        return Channel(
            f"{task.name}_ready", task.name, rows, chunks, tile_rows=chief.tile[0], cuts="experts",
            table=chief.operands[2], place=task.place,
        )  # fmt: skip
    chief, name = program.chief(task.kernel), carriers(program, task.kernel).partials
    height, width = chief.tile[:2]
    return Channel(
        f"{name}_ready", name, rows, "tiles", tile_rows=height, cuts="experts", columns=width,
        to="owner", table=chief.operands[2], place=task.place,
    )  # fmt: skip


def _of_sums(program: Program, task: Task) -> Iterator[Channel]:
    """Of summands on their way to who sums them, and of what comes back from there."""
    assert task.type is not None
    tasks = program.of_kernel(task.kernel)
    height, width = task.tile
    is_product = tasks[0].kind == "matmul"
    by_all = task.engine == "one_shot_ll"
    carried = carriers(program, task.kernel)
    if is_carried(task):
        yield from _of_chunks(task, carried)
        return
    sent = Channel(
        f"{carried.partials}_ready", carried.partials, task.type.sizes[0], "tiles", height, height,
        "each" if by_all else "part", columns=width if is_product else 0,
        to="all" if by_all else "owner", by="packet" if task.engine in LL else "word",
        place=task.place,
    )  # fmt: skip
    yield sent
    if carried.gathered:
        (gathered,) = carried.gathered.values()
        yield replace(sent, name=f"{gathered}_ready", buffer=gathered, to="all")


def _of_chunks(task: Task, carried: Carriers) -> Iterator[Channel]:
    """Of tiles that engines carry, a word for each chunk of a part's columns: when its last tile
    is stored here, and when its owner has it."""
    assert task.type is not None and isinstance(task.chunks, int)
    (rows, columns), height = task.type.sizes, task.tile[0]
    width = columns // task.chunks if task.chunks > 1 and isinstance(columns, int) else 0
    yield Channel(
        f"{carried.kept}_ready", carried.kept, rows, 1, height, height, "part", columns=width,
        to="engine", place=task.place,
    )  # fmt: skip
    yield Channel(
        f"{carried.partials}_ready", carried.partials, rows, 1, tile_rows=height, cuts="part",
        columns=width, to="owner", place=task.place,
    )  # fmt: skip


class Carriers(NamedTuple):
    """Buffers by which a kernel's sums travel: on the heap `partials`, and `gathered` by the value
    that it has, of which there is one: what follows from it each rank makes itself, from the same
    bits. `kept` has what engines carry."""

    partials: str
    gathered: dict[str, str]
    kept: str = ""


def carriers(program: Program, kernel: str) -> Carriers:
    """What a kernel that sums over ranks needs beside its operands; names that no task has."""
    taken = {task.name for task in program.tasks}
    found = Carriers("", {})
    for name in program.kernels:
        tasks = program.of_kernel(name)
        sums = [one for one in tasks if one.kind in ("reduce_scatter", "all_reduce")]
        if not sums:
            continue
        partials = _unique("partials", taken)
        made = made_for_others(program, tasks) if sums[0].kind == "all_reduce" else ()
        values = (travelling([(one.name, one.operands) for one in tasks], made),) if made else ()
        if sums[0].engine == "one_shot_ll":
            values = ()  # each rank sums all rows itself
        whole = {value: _unique("gathered", taken) for value in values}
        kept = _unique("kept", taken) if is_carried(sums[0]) else ""
        if name == kernel:
            found = Carriers(partials, whole, kept)
    return found


def made_for_others(program: Program, tasks: Sequence[Task]) -> tuple[str, ...]:
    """The values of a kernel that are used outside of it, in order."""
    names = {one.name for one in tasks}
    return tuple(
        one.name
        for one in tasks
        if one.name in program.results
        or any(user.name not in names for user in program.users(one.name))
    )


def travelling(body: Sequence[tuple[str, tuple[str, ...]]], made: Collection[str]) -> str:
    """The last value of a kernel's (name, operands) from which follow all that are `made` for
    others: of it, not of each of those, every rank needs other ranks' rows.

        reduced = all_reduce(x); total = add(reduced, residual); normed = rms_norm(total, weight)
        made = (total, normed)    ->    total
    """
    names = [name for name, _ in body]
    for i in reversed(range(len(body))):
        needed = set(made) - {names[i]}
        for name, operands in reversed(body[i + 1 :]):
            if name in needed:
                needed |= set(operands) & set(names)
                needed -= {name, names[i]}
        if not needed:
            return names[i]
    return names[0]


def _unique(name: str, taken: set[str]) -> str:
    """The name, numbered where it is taken; now it is."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique


def _view(
    channel: Channel, sizes: Mapping[str, int], num_ranks: int, *, is_producer: bool
) -> mapping.StaticMapping:
    rows = number(channel.rows, sizes)
    if channel.cuts == "each":
        # Of each source's words: all rows are one part, whoever sends them.
        num_ranks = 1
    view = mapping.StaticMapping.of(
        rows, num_ranks, chunks=num_chunks(channel, rows, num_ranks), push_rows=channel.push_rows,
        tile_rows=None if is_producer else channel.tile_rows,
    )  # fmt: skip
    if not is_producer and channel.cuts in ("part", "each"):
        view = view._replace(kind=mapping.PART.value)
    return view


def num_chunks(channel: Channel, rows: int, num_ranks: int) -> int:
    """Words of one rank's part, for one of its columns of tiles."""
    if isinstance(channel.chunks, int):
        return channel.chunks
    return max(1, -(-max(1, full_part(rows, num_ranks)) // channel.push_rows))


def _spans(view: Any) -> Iterator[Span]:
    f_shape, f_channel = map(mapping.as_python, (mapping.f_shape, mapping.f_channel))
    for i in range(view.num_tiles):
        first, end = f_shape(i, view)
        word, count = f_channel(i, view)
        if first < end:
            yield Span(first, end, word, count)
