"""Say of each collective over rows which range, on which rank, is announced on which signal word.

    g = all_gather(x, dim=0)    ->    g_ready = channel(g, m, chunks=2, push_rows=64, tile_rows=128)

The mapping is static and affine (weft.language.mapping): rows lie over ranks as torch.chunk splits
them, each rank's part in chunks with a word each. Whoever produces cuts each rank's part into
tiles of its own height, whoever consumes cuts all rows (gather) or its own (scatter) into others;
nothing need divide. `check` shows for given sizes that the two views fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.errors import ConfigError
from weft.compiler.passes.tile import number
from weft.ir.device import Channel
from weft.ir.task import Program, Task
from weft.language import mapping

# Signal words per rank: 2, so that the first half is used while the second is on its way.
CHUNKS = 2


def map_rows(program: Program, chunks: int = CHUNKS) -> tuple[Channel, ...]:
    """The channels of a tiled program, one for each collective over rows and height of consumer.

    Collectives over columns and all_reduce have none: no lowering overlaps them.
    """
    return tuple(
        channel
        for task in program.tasks
        if task.dim == 0
        for channel in _channels(program, task, chunks)
    )


class Span(NamedTuple):
    """A tile's rows first .. end - 1, and the words word .. word + count - 1 that announce them."""

    first: int
    end: int
    word: int
    count: int


def check(channel: Channel, sizes: Mapping[str, int], num_ranks: int) -> None:
    """Raises  ConfigError: tiles that do not fit together, at these sizes"""
    produced, consumed = views(channel, sizes, num_ranks)
    f_count = mapping.as_python(mapping.f_count)
    view = _view(channel, sizes, num_ranks, is_producer=True)
    full = [f_count(word, view) for word in range(num_ranks * channel.chunks)]
    if wrong := list(misfits(number(channel.rows, sizes), produced, consumed, full)):
        told = f"channel {channel.name} with {sizes} on {num_ranks} ranks"
        raise ConfigError(f"{told}: {'; '.join(wrong)}", place=channel.place)


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
    """What is wrong with a mapping, static or of tables: with the tiles' numbers and rows.

    `full[word]` is how many of the producer's tiles make the word full.
    """
    for name, tiles in (("the producer's", produced), ("the consumer's", consumed)):
        at, last = 0, None
        for i in sorted(range(len(tiles)), key=lambda i: tiles[i].first):
            first, end = tiles[i].first, tiles[i].end
            if first > at:
                yield f"rows {at} to {first - 1} are in none of {name} tiles"
            if first < at:
                yield f"{name} tiles {last} and {i} both have row {first}"
            at, last = max(at, end), i
        if at != rows:
            yield f"{name} tiles end at row {at} of {rows}"
    given = [0] * len(full)
    for i, one in enumerate(produced):
        for word in range(one.word, one.word + one.count):
            if not 0 <= word < len(full):
                yield f"the producer's tile {i} announces word {word} of {len(full)}"
                continue
            given[word] += 1
    for word, (expected, there) in enumerate(zip(full, given)):
        if expected != there:
            yield f"word {word} is full at {expected}, and {there} tiles announce it"
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
                    f"{waits.stop - 1}"
                )


def _channels(program: Program, task: Task, chunks: int) -> Iterator[Channel]:
    assert task.type is not None
    rows, name = task.type.sizes[0], f"{task.name}_ready"
    source = program.task(task.operands[0])
    if task.kind == "reduce_scatter":
        # Every rank sends its summand of each tile to whose part it is.
        push_rows = (source.tile or task.tile)[0]
        yield Channel(name, task.name, rows, chunks, push_rows, task.tile[0], "part", "num_ranks",
                      place=task.place)  # fmt: skip
        return
    readers = [one for one in program.tasks if task.name in one.operands]
    heights = sorted({one.tile[0] for one in readers} or {task.tile[0]})
    for i, height in enumerate(heights):
        unique = f"{name}_{i}" if i else name
        yield Channel(unique, task.name, rows, chunks, task.tile[0], height, place=task.place)


def _view(
    channel: Channel, sizes: Mapping[str, int], num_ranks: int, *, is_producer: bool
) -> mapping.StaticMapping:
    rows = number(channel.rows, sizes)
    view = mapping.StaticMapping.of(
        rows, num_ranks, chunks=channel.chunks, push_rows=channel.push_rows,
        tile_rows=None if is_producer else channel.tile_rows,
    )  # fmt: skip
    if not is_producer and channel.cuts == "part":
        view = view._replace(kind=mapping.PART.value)
    return view


def _spans(view: Any) -> Iterator[Span]:
    f_shape, f_channel = map(mapping.as_python, (mapping.f_shape, mapping.f_channel))
    for i in range(view.num_tiles):
        first, end = f_shape(i, view)
        word, count = f_channel(i, view)
        if first < end:
            yield Span(first, end, word, count)
