"""Where buffers lie, and which waits the reuse of memory needs.

A buffer lives from the first stage that touches it to the last, and lies where others that live at
the same time do not. Of memory that is used again every access of the former must be over, on all
ranks that touch it, before anybody writes the latter: these are dependencies like all others, also
those of peers that write into one's memory. They are found by rows: one task needs another if a row
of the one shares a byte with a row of the other. Whole rows are as exact as products ask for, which
read whole rows, and keep the pairs to look at as few as rows of tiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.compiler.passes.allocate import ALIGNMENT
from weft.ir.task import Task
from weft.megakernel.records import Access, Buffer
from weft.megakernel.tiles import ONE_SHOT, SUMMED, Dependency, TiledProgram, partials_of, result_of

# Stages for which memory lies idle before it is used again. Whoever would have to wait for its last
# readers has then waited for others who have, as a rule, and nothing is to be signalled.
REST = 8
# What parts of a product are stored in: whoever adds them up rounds once, as a whole product is.
PARTS = "float32"
# Memory is never used again.
NEVER = 1 << 30


class Layout(NamedTuple):
    """Buffers by rank and name, and the bytes of all that is local and all that is symmetric."""

    buffers: list[dict[str, Buffer]]
    local_bytes: int
    symmetric_bytes: int


class Life(NamedTuple):
    """The first and the last stage that touches a buffer."""

    first: int
    last: int


def lay_out(made: TiledProgram, *, rest: int = REST) -> Layout:
    """A place for every buffer that is not the caller's, the same on all ranks.

    Memory whose buffers have been over for `rest` stages is given out again, that which was over
    first before the rest.
    """
    found = [_buffers(made, rank) for rank in range(made.num_ranks)]
    lives = lifetimes(made)
    placed: dict[str, list[Placed]] = {"local": [], "symmetric": []}
    for name, buffer in found[0].items():
        if buffer.role not in placed:
            continue
        size = -(-bytes_of(buffer) // ALIGNMENT) * ALIGNMENT
        life = lives.get(name, Life(0, 0))
        one = _placed(placed[buffer.role], size, buffer.columns, life, rest)
        placed[buffer.role].append(one)
        for rank in found:
            rank[name] = replace(rank[name], offset=one.first)
    return Layout(found, *(max((one.end for one in placed[role]), default=0) for role in placed))


def lifetimes(made: TiledProgram) -> dict[str, Life]:
    """By buffer, in stages."""
    found: dict[str, Life] = {}
    for i, stage in enumerate(made.stages):
        for task in made.tasks[stage.first : stage.end]:
            for access in (*task.reads, *task.writes):
                first = found.get(access.buffer, Life(i, i)).first
                found[access.buffer] = Life(first, i)
    return found


def bytes_of(buffer: Buffer) -> int:
    return buffer.rows * buffer.columns * DTYPES[buffer.dtype].itemsize


class Placed(NamedTuple):
    """Bytes first .. end - 1, in rows of so many columns, by whoever lives there."""

    first: int
    end: int
    columns: int
    life: Life


def _placed(placed: list[Placed], size: int, columns: int, life: Life, rest: int) -> Placed:
    """A place beside all that lives, or rests, at the same time: within what there is; where the
    same rows lay, so that who makes a row has most likely waited for who read it; where what lay
    there has been over for longest. Else behind all."""
    end = max((one.end for one in placed), default=0)
    found: list[tuple[bool, bool, int, int]] = []
    for first in {0, end, *(one.end for one in placed)}:
        there = [one for one in placed if one.first < first + size and first < one.end]
        if all(one.life.last + rest < life.first for one in there):
            is_other = any((one.first, one.columns) != (first, columns) for one in there)
            last = max((one.life.last for one in there), default=-1)
            found.append((first + size > end, is_other, last, first))
    first = min(found)[3]
    return Placed(first, first + size, columns, life)


def _buffers(made: TiledProgram, rank: int) -> dict[str, Buffer]:
    """Of one rank, in order. What weft allocates is as large as a full part, on every rank."""
    found: dict[str, Buffer] = {}
    for task in made.program.tasks:
        name, dtype = task.name, made.type_of(task.name).dtype
        if made.home(name) != name:
            continue
        if task.kind in SUMMED and made.num_ranks > 1:
            rows, columns = made.part(task, 0).extents
            split = made.split_of(task.operands[0])
            slabs = (rows * made.num_ranks * split, columns)
            of = dtype if split == 1 else PARTS
            found[partials_of(name)] = Buffer(partials_of(name), "symmetric", of, *slabs)
        role = "input" if task.kind == "input" else "local"
        role = "symmetric" if made.is_symmetric(task) else role
        role = "result" if role == "local" and name in made.results else role
        mine = role in ("input", "result")
        extents = made.held(name, rank if mine else 0).extents
        if task.split_k > 1:  # one part behind the other
            found[name] = Buffer(name, role, PARTS, extents[0] * task.split_k, extents[1])
            continue
        found[name] = Buffer(name, role, "float32" if _is_summand(made, task) else dtype, *extents)
        if result_of(name) in made.results:
            found[result_of(name)] = Buffer(result_of(name), "result", dtype, *extents)
    return found


def _is_summand(made: TiledProgram, task: Task) -> bool:
    """Is it read only to be summed over ranks? Then the own summand is not rounded before."""
    users = made.program.users(task.name)
    is_read = task.kind == "input" or task.name in made.program.results
    is_summed = (
        one.kind in SUMMED and one.engine != ONE_SHOT and one.operands[0] == task.name
        for one in users
    )  # fmt: skip
    return not is_read and bool(users) and all(is_summed)


class Touch(NamedTuple):
    """Tasks of one stage that touch the bytes first .. end - 1 of one rank's memory."""

    first: int
    end: int
    tasks: tuple[int, ...]


def reuses(made: TiledProgram, layout: Layout) -> list[Dependency]:
    """Waits that are needed because memory is used again: what lay there must be over."""
    touched = _touches(made, layout)
    lives = lifetimes(made)
    found: dict[tuple[int, ...], set[int]] = {}
    for name, other in _sharing(layout, lives):
        for rank in range(made.num_ranks):
            for later, is_write, behind in touched.get((rank, other), ()):
                if not is_write:
                    continue
                for earlier, _, before in touched.get((rank, name), ()):
                    if earlier < later:
                        _join(before, behind, found)
    return [Dependency(before, tuple(sorted(after))) for before, after in found.items()]


def _join(before: list[Touch], behind: list[Touch], found: dict[tuple[int, ...], set[int]]) -> None:
    """Each of `behind` needs all of `before` that it shares a byte with, as one need."""
    # Of all up to each: rows of one may lie within another's.
    ends = [*accumulate((one.end for one in before), max)]
    for one in behind:
        needed: set[int] = set()
        for earlier in before[bisect_right(ends, one.first) :]:
            if earlier.first >= one.end:
                break
            if earlier.end > one.first:
                needed.update(earlier.tasks)
        if needed:
            found.setdefault(tuple(sorted(needed)), set()).update(one.tasks)


def _sharing(layout: Layout, lives: dict[str, Life]) -> Iterator[tuple[str, str]]:
    """Pairs of buffers in the same memory, the one that is over first first; and what is written
    where it lies."""
    buffers = layout.buffers[0]
    for name, one in buffers.items():
        for other_name, other in buffers.items():
            if name == other_name:
                if one.role == "input" and name in lives:
                    yield name, name
            elif one.role == other.role and one.role in ("local", "symmetric"):
                meet = one.offset < other.offset + bytes_of(other)
                meet = meet and other.offset < one.offset + bytes_of(one)
                if meet and lives[name].last < lives[other_name].first:
                    yield name, other_name


def _touches(
    made: TiledProgram, layout: Layout
) -> dict[tuple[int, str], list[tuple[int, bool, list[Touch]]]]:
    """By rank and buffer, for each stage and for reads and writes: who touches which rows, in the
    order of rows."""
    found: dict[tuple, dict[tuple[int, int], list[int]]] = {}
    for i, stage in enumerate(made.stages):
        for number in range(stage.first, stage.end):
            task = made.tasks[number]
            for is_write, accesses in ((False, task.reads), (True, task.writes)):
                for access in accesses:
                    span = span_of(access, layout.buffers[access.rank][access.buffer])
                    if span[0] < span[1]:
                        key = (access.rank, access.buffer, i, is_write)
                        found.setdefault(key, {}).setdefault(span, []).append(number)
    by_buffer: dict[tuple[int, str], list[tuple[int, bool, list[Touch]]]] = {}
    for (rank, name, i, is_write), spans in found.items():
        touches = [Touch(*span, tuple(sorted(set(spans[span])))) for span in sorted(spans)]
        by_buffer.setdefault((rank, name), []).append((i, is_write, touches))
    return by_buffer


def span_of(access: Access, buffer: Buffer) -> tuple[int, int]:
    """The bytes first .. end - 1 of whole rows that an access touches, within its role's memory."""
    row_bytes = buffer.columns * DTYPES[buffer.dtype].itemsize
    if access.region.is_empty:
        return 0, 0
    first, end = access.region.first_row, access.region.end_row
    return buffer.offset + first * row_bytes, buffer.offset + end * row_bytes
