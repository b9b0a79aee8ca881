"""Which device functions a program's tasks need: operations that are done alike share a body.

An operation is what one kind of task does for one value: the product h, the sending of h's
summands. Operations of equal kind, tile, dtypes and destination are one body of the kernel, given
other pointers and sizes: the kernel of many layers is as long as that of one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2
from typing import Any

from weft.base.errors import ConfigError, UnsupportedError
from weft.base.parts import full_part
from weft.compiler.passes.tile import number
from weft.ir import kinds
from weft.ir.task import Task
from weft.ir.tensor import is_split
from weft.megakernel.forms import COMPUTES, KINDS, MOVES
from weft.megakernel.records import (
    COPY,
    GATHER,
    REDUCE,
    REDUCE_ADD,
    REDUCES,
    SEND,
    TaskGraph,
    TileTask,
)
from weft.megakernel.sequences import OF_KEYS
from weft.megakernel.tiles import ADDS_PARTS

# Kinds whose bodies store what they make themselves.
WITHOUT = ("kv_append", *OF_KEYS)
TO_ALL = "to_all"
# Steps over k where a product's tile does not say.
TILE_K = 64


@dataclass(frozen=True)
class Operation:
    """What tasks of one kind do for the value `task`: from buffers `reads` into buffer `write`, and
    into `partials` of peers, if they have any."""

    kind: str
    task: Task
    reads: tuple[str, ...]
    write: str
    destination: str
    partials: str = ""

    @property
    def formula(self) -> str:
        """What it does, in a line."""
        if self.kind in MOVES:
            what = {GATHER: "gathers", SEND: "sends", COPY: "copies"}.get(self.kind, "sums")
            what += f" and {self.task.operands[1]}, each of" if self.kind == REDUCE_ADD else ""
            where = self.destination.replace("_", " ").replace("placed", "here")
            return f"{self.task.name}: {what} {self.reads[0]}, {where}"
        return f"{self.task.name} = {self.kind}({', '.join(self.task.operands)})"


@dataclass(frozen=True)
class Body:
    """Operations that one device function does, numbered by their place among them."""

    name: str
    kind: str
    tile: tuple[int, ...]
    destination: str
    operations: tuple[Operation, ...]
    attributes: tuple[tuple[str, Any], ...] = field(default=())


def operations(graph: TaskGraph) -> tuple[Operation, ...]:
    """The operations of a graph, in the order of its program, sends before what sums them.

    Raises  UnsupportedError, ConfigError: kinds and tiles that no body serves, at the user's line
    """
    places = {task.name: i for i, task in enumerate(graph.program.tasks)}
    kinds = {GATHER: 0, SEND: 0, REDUCE: 1, REDUCE_ADD: 1, COPY: 2}
    found: dict[tuple[str, str], list[TileTask]] = {}
    for one in graph.tasks:
        found.setdefault((one.op, one.kind), []).append(one)
    order = sorted(found, key=lambda key: (places[key[0]], kinds.get(key[1], 0)))
    return tuple(_operation(graph, graph.program.task(key[0]), found[key]) for key in order)


def _operation(graph: TaskGraph, task: Task, tiles: Sequence[TileTask]) -> Operation:
    first = tiles[0]
    if first.kind not in KINDS:
        message = f"{task.name}: the persistent kernel has no task for {first.kind}"
        raise UnsupportedError(f"{message}; it has {', '.join(COMPUTES)}", place=task.place)
    # Of a cache one row is written; the queries that share a head are padded.
    extents = () if task.kind in OF_KEYS else task.tile[task.kind == "kv_append" :]
    if any(extent & (extent - 1) for extent in extents):
        message = f"{task.name} has tile={task.tile}; the persistent kernel takes powers of two"
        raise ConfigError(message, place=task.place)
    if first.kind in COMPUTES:
        # Of an operand in parts each part is read.
        splits = [graph.program.task(name).split_k for name in task.operands]
        reads = tuple(first.reads[end - 1].buffer for end in accumulate(splits))
    else:
        # Partial sums of several ranks are one buffer; which rows are whose the body knows.
        reads = tuple(dict.fromkeys(name for one in tiles for access in one.reads
                                    for name in [access.buffer]))  # fmt: skip
        reads = tuple(sorted(reads, key=lambda name: name.endswith("_partials")))
    write, *others = dict.fromkeys(one.buffer for one in first.writes)
    where = _destination(graph, tiles)
    return Operation(first.kind, task, reads, write, where, *others)


def _destination(graph: TaskGraph, tiles: Sequence[TileTask]) -> str:
    """Which hook of tasks/destinations.py serves all of these."""
    kind = tiles[0].kind
    if kind not in MOVES:
        is_sent = any(len(tile.writes) > 1 for tile in tiles)
        return "" if kind in WITHOUT else TO_ALL if is_sent else "here"
    if kind == SEND:
        return "to_owner"
    return "everywhere" if any(len(tile.writes) > 1 for tile in tiles) else "placed"


def bodies(graph: TaskGraph, transposed: Set[str] = frozenset()) -> tuple[Body, ...]:
    """The bodies of a graph's kernel, in the order of their first operations. `transposed` are
    right operands of products that lie as [n, k]."""
    groups: dict[tuple, list[Operation]] = {}
    for one in operations(graph):
        groups.setdefault(_alike(graph, one, transposed), []).append(one)
    names: dict[str, int] = {}
    found = []
    for (kind, tile, destination, attributes, *_), group in groups.items():
        names[kind] = names.get(kind, 0) + 1
        name = f"{kind}_{names[kind]}" if names[kind] > 1 else kind
        found.append(Body(name, kind, tile, destination, tuple(group), attributes))
    return tuple(found)


def _alike(graph: TaskGraph, one: Operation, transposed: Set[str]) -> tuple:
    """What operations of one body have in common."""
    rank = graph.ranks[0]
    dtypes = tuple(rank.buffer(name).dtype for name in (*one.reads, one.write))
    tile = one.task.tile
    attributes: dict[str, Any] = {}
    splits = [graph.program.task(name).split_k for name in one.task.operands]
    if one.kind in kinds.WEIGHTED:
        tile = tile if len(tile) == 3 else (*tile, TILE_K)
        columns = rank.buffer(one.reads[0]).columns
        attributes["b_is_nk"] = one.reads[1] in transposed
        attributes["is_k_even"] = columns % tile[2] == 0
        attributes["split_k"] = one.task.split_k
    elif one.kind in COMPUTES:
        names = kinds.KINDS[one.kind].attributes
        attributes.update((name, getattr(one.task, name)) for name in names)
        if one.task.base is not None:
            attributes["log2_base"] = log2(attributes.pop("base"))
        source = graph.program.task(one.task.operands[0]).type
        assert source is not None
        if between := attributes.pop("between", None):
            is_part = is_split(source.placement, 1)
            attributes["first"] = between[0] // (graph.num_ranks if is_part else 1)
        if one.kind == "embedding":  # how far the first rows of neighbouring ranks lie apart
            rows = full_part(number(source.sizes[0], graph.sizes), graph.num_ranks)
            attributes["part"] = rows if is_split(source.placement, 0) else 0
        if (place := ADDS_PARTS.get(one.kind)) is not None and splits[place] > 1:
            product = graph.program.task(one.task.operands[place])
            attributes["parts"] = splits[place], product.type and product.type.dtype
    elif one.kind == GATHER:
        attributes["dim"] = one.task.dim
    elif one.kind in REDUCES:
        attributes["split_k"] = splits[0]
    return one.kind, tile, one.destination, tuple(attributes.items()), dtypes, len(one.reads)
