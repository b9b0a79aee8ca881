"""Programs made of tasks, and what their tasks need by brute force: cell by cell of memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from weft.base.dtypes import DTYPES
from weft.base.errors import UnsupportedError
from weft.compiler import Halves, Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import tile
from weft.ir.task import Program
from weft.megakernel.graph import build
from weft.megakernel.records import COPY, REDUCE, SEND, TaskGraph, TileTask

sys.path.insert(0, str(Path(__file__).parent.parent / "compiler"))

from random_programs import random_program


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def mlp_of_halves(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1, side_by_side=True) @ w2)


def tiled(function, parameters, extents=None, default=(16, 16)) -> Program:
    """A function as a tiled program; `extents` of tasks by name, the others' are `default`."""
    placed = place(trace(function, "tp", parameters))
    names = [task.name for task in placed.tasks if task.kind != "input"]
    return tile(placed, {**dict.fromkeys(names, default), **(extents or {})})


def tiled_mlp(
    k: int = 32, f: int = 64, n: int = 32, extents=None, dtype: str = "float32", function=mlp
):  # fmt: skip
    parameters = {
        "x": Tensor(dtype, ("m", k), Shard(0)),
        "w1": Tensor(dtype, (k, 2 * f), Shard(1) if function is mlp else Halves(1)),
        "w2": Tensor(dtype, (f, n), Shard(0)),
    }
    return tiled(function, parameters, extents)


def random_graph(seed: int, num_ranks: int, *, rest: int = 0) -> TaskGraph | None:
    """Of a random program in random tiles; None of one that no tasks are made of."""
    chooser = random.Random(seed)
    placed = random_program(seed, num_ranks).stages.tasks["place"]
    if chooser.random() < 0.7:  # else all values are results, and no memory is weft's
        placed = replace(placed, results=placed.results[-1:])
    extents = {
        task.name: (chooser.randint(1, 5), chooser.randint(1, 5))
        for task in placed.tasks
        if task.kind != "input"
    }
    sizes = {"m": chooser.randint(0, 9)}
    try:
        return build(tile(placed, extents), sizes, num_ranks, rest=rest)
    except UnsupportedError:
        return None


def in_program_order(graph: TaskGraph) -> list[TileTask]:
    """All ranks' tasks, one operation after the other: right if one worker did all of them."""
    names = [task.name for task in graph.program.tasks]
    phases = {SEND: 1, REDUCE: 2, COPY: 3}
    return sorted(
        graph.tasks,
        key=lambda one: (
            one.kind == COPY, names.index(one.op), phases.get(one.kind, 0), one.rank, one.id,
        ),
    )  # fmt: skip


def before_by_counters(graph: TaskGraph) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """All that is over, by waits and bumps alone, when a task begins; tasks are (rank, id)."""
    makers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for task in graph.tasks:
        for bump in task.bumps:
            makers.setdefault((bump.rank, bump.counter), []).append((task.rank, task.id))
    direct = {
        (task.rank, task.id): {
            one for wait in task.waits for one in makers[task.rank, wait.counter]
        }
        for task in graph.tasks
    }
    return closed(direct, in_program_order(graph))


def closed(direct, order) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """With what is before those before."""
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for task in order:
        key = (task.rank, task.id)
        found[key] = set().union(*({one} | found[one] for one in direct[key]))
    return found


def cells(graph: TaskGraph, access) -> Iterator[tuple]:
    """Two bytes each, of whose memory."""
    buffer = graph.ranks[access.rank].buffer(access.buffer)
    units = DTYPES[buffer.dtype].itemsize // 2
    region = access.region
    memory = buffer.role if buffer.role in ("local", "symmetric") else buffer.name
    assert region.end_row <= buffer.rows and region.end_column <= buffer.columns
    for row, column in product(range(*region[:2]), range(*region[2:])):
        first = buffer.offset // 2 + (row * buffer.columns + column) * units
        for unit in range(units):
            yield memory, access.rank, first + unit


def needed_by_cells(graph: TaskGraph):
    """What each task must come after: ({who made what it reads}, {those and who else used what it
    overwrites}), and who wrote each cell last. Every read finds what is meant."""
    writers: dict[tuple, tuple[int, int]] = {}
    named: dict[tuple, str] = {}
    readers: dict[tuple, set[tuple[int, int]]] = {}
    made, used = {}, {}
    order = in_program_order(graph)
    for task in order:
        key = (task.rank, task.id)
        made[key], used[key] = set(), set()
        for access in task.reads:
            for cell in cells(graph, access):
                readers.setdefault(cell, set()).add(key)
                if cell in writers:
                    made[key].add(writers[cell])
                    assert named[cell] == access.buffer, f"{task} reads what {named[cell]} is"
                else:
                    assert graph.ranks[access.rank].buffer(access.buffer).role == "input", task
        for access in task.writes:
            for cell in cells(graph, access):
                used[key] |= readers.pop(cell, set()) | ({writers[cell]} & {*writers.values()}
                                                         if cell in writers else set())  # fmt: skip
                writers[cell], named[cell] = key, access.buffer
        used[key] |= made[key]
        used[key].discard(key)
    return made, used, writers
