"""Say of each collective over rows which range, on which rank, is announced on which signal word.

    g = all_gather(x, dim=0, chunks=2)    ->    g_ready = channel(g, m, chunks=2, tile_rows=128)

The mapping is static and affine (weft.language.mapping): rows lie over ranks as torch.chunk splits
them, each rank's part in chunks with a word each. Whoever produces cuts each rank's part into
tiles of its own height, whoever consumes cuts all rows (gather) or its own (scatter) into others;
nothing need divide.

What a kernel sums over ranks lies in `partials`, whose tiles are those of the product, a word for
each at the rank that sums it; where engines carry them, from `staged`, a word for each chunk of
columns. What comes back lies in `gathered`, where its rows stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.ir.device import Channel, scales_of
from weft.ir.task import LL, TRAVELLING, Program, Task, arrives, is_staged, takes_tokens


def channels_of(program: Program) -> tuple[Channel, ...]:
    """The channels of a planned program: of each collective over rows that is part of a kernel."""
    channels: list[Channel] = []
    for task in program.tasks:
        if task.kernel and _is_grouped(program, task):
            channels.append(_of_tables(program, task))
        elif task.kernel and arrives(task):
            channels.append(_of_rows(program, task))
        elif task.kernel and task.kind in TRAVELLING:
            channels += _of_sums(program, task)
    return tuple(channels)


def _of_rows(program: Program, task: Task) -> Channel:
    """Whoever carries the rows says of each chunk when all of it is there: of each rank's rows, or
    of own ones' columns from each rank."""
    assert task.type is not None
    rows, name = task.type.sizes[0], f"{task.name}_ready"
    users = program.users(task.name)
    # What sums over rows reads so many at a time, and chunks are of whole such steps.
    is_summed = any(one.kind == "matmul_tn" for one in users)
    height = min(one.tile[2 * is_summed] for one in users)
    if task.engine in LL:
        return Channel(name, task.name, rows, tile_rows=height, by="packet", place=task.place)
    return Channel(
        name, task.name, rows, task.chunks, height if is_summed else 1, height,
        "whole" if task.kind == "all_gather" else "part",
        to="all" if task.kind == "all_gather" else "owner", own=task.operands[0],
        along=(scales_of(task.name),) if any(one.scaling for one in users) else (),
        place=task.place,
    )  # fmt: skip


def _is_grouped(program: Program, task: Task) -> bool:
    """Are its rows those of a product's tiles as tables say, which the device alone knows?"""
    users = program.users(task.name)
    return task.kind == "all_gather" and any(one.kind == "gather_rows" for one in users)


def _of_tables(program: Program, task: Task) -> Channel:
    """Of tokens on their way to all ranks, by whom they are fed."""
    assert task.type is not None
    (reader,) = program.users(task.name)
    chief = program.chief(reader.kernel)
    return Channel(
        f"{task.name}_ready", task.name, task.type.sizes[0], task.chunks, tile_rows=chief.tile[0],
        cuts="experts", table=chief.operands[2], place=task.place,
    )  # fmt: skip


def _of_sums(program: Program, task: Task) -> Iterator[Channel]:
    """Of tiles on their way to their owners, who sum them or keep them, and of what comes back from
    there."""
    assert task.type is not None
    tasks = program.of_kernel(task.kernel)
    height, width = task.tile
    is_product = tasks[0].kind == "matmul"
    by_all = task.engine == "one_shot_ll"
    buffers = sum_buffers(program, task.kernel)
    if is_staged(task):
        yield from _of_chunks(task, buffers)
        return
    sent = Channel(
        f"{buffers.partials}_ready", buffers.partials, task.type.sizes[0], "tiles", height, height,
        "each" if by_all else "part", columns=width if is_product else 0,
        to="all" if by_all else "owner", by="packet" if task.engine in LL else "word",
        place=task.place,
    )  # fmt: skip
    yield sent
    if buffers.relayed:
        yield replace(sent, name=f"{buffers.relayed}_ready", buffer=buffers.relayed, to="partner")
    if buffers.gathered:
        (gathered,) = buffers.gathered.values()
        yield replace(sent, name=f"{gathered}_ready", buffer=gathered, to="all")


def _of_chunks(task: Task, buffers: SumBuffers) -> Iterator[Channel]:
    """Of tiles that engines carry, a word for each chunk of a part's columns: when its last tile
    is stored here, and when its owner has it."""
    assert task.type is not None and isinstance(task.chunks, int)
    (rows, columns), height = task.type.sizes, task.tile[0]
    width = columns // task.chunks if task.chunks > 1 and isinstance(columns, int) else 0
    if takes_tokens(task):
        yield Channel(
            f"{buffers.staged}_ready", buffers.staged, rows, 1, height, height, "part",
            columns=width, to="engine", place=task.place,
        )  # fmt: skip
    yield Channel(
        f"{buffers.partials}_ready", buffers.partials, rows, 1, tile_rows=height, cuts="part",
        columns=width, to="owner", place=task.place,
    )  # fmt: skip


class SumBuffers(NamedTuple):
    """Buffers by which a kernel's tiles travel: on the heap `partials`, the shares of each rank (of
    all_to_all no summands, and called `received`), and `gathered` by the value
    that it has, of which there is one: what follows from it each rank makes itself, from the same
    bits. `staged` has what engines carry, `relayed` what is added up for ranks of other nodes."""

    partials: str
    gathered: dict[str, str]
    staged: str = ""
    relayed: str = ""


def sum_buffers(program: Program, kernel: str) -> SumBuffers:
    """What a kernel whose tiles travel needs beside its operands; names that no task has."""
    taken = {task.name for task in program.tasks}
    found = SumBuffers("", {})
    for name in program.kernels:
        tasks = program.of_kernel(name)
        sums = [one for one in tasks if one.kind in TRAVELLING and not arrives(one)]
        if not sums:
            continue
        is_moved = sums[0].kind == "all_to_all"
        partials = _unique("received" if is_moved else "partials", taken)
        made = made_for_others(program, tasks) if sums[0].kind == "all_reduce" else ()
        values = (travelling([(one.name, one.operands) for one in tasks], made),) if made else ()
        if sums[0].engine == "one_shot_ll":
            values = ()  # each rank sums all rows itself
        whole = {value: _unique("gathered", taken) for value in values}
        staged = _unique("staged", taken) if is_staged(sums[0]) else ""
        relayed = _unique("relayed", taken) if sums[0].engine == "relay" else ""
        if name == kernel:
            found = SumBuffers(partials, whole, staged, relayed)
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
