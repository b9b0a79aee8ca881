"""Which device functions a program's tasks need: operations that are done alike share a body.

An operation is what one kind of task does for one value: the product h, the sending of h's
summands. Operations of equal kind, tile, dtypes and destination are one body of the kernel, given
other pointers and sizes: the kernel of many layers is as long as that of one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import log2
from typing import Any

from weft.base.errors import ConfigError, UnsupportedError
from weft.ir.task import Task
from weft.megakernel.records import COPY, GATHER, REDUCE, SEND, TaskGraph, TileTask

MOVES = (GATHER, SEND, REDUCE, COPY)
# Kinds whose bodies store what they make themselves.
WITHOUT = ("kv_append", "decode_attention")
# Steps over k where a product's tile does not say; kinds of tasks that have a body.
TILE_K = 64
COMPUTES = (
    "matmul", "silu", "silu_mul", "silu_mul_halves", "mul", "add", "rms_norm", "rope",
    "kv_append", "decode_attention",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """What tasks of one kind do for the value `task`: from buffers `reads` into buffer `write`."""

    kind: str
    task: Task
    reads: tuple[str, ...]
    write: str
    destination: str

    @property
    def formula(self) -> str:
        """What it does, in a line."""
        if self.kind in MOVES:
            what = {GATHER: "gathers", SEND: "sends", COPY: "copies", REDUCE: "sums"}[self.kind]
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
    kinds = {GATHER: 0, SEND: 0, REDUCE: 1, COPY: 2}
    found: dict[tuple[str, str], list[TileTask]] = {}
    for one in graph.tasks:
        found.setdefault((one.op, one.kind), []).append(one)
    order = sorted(found, key=lambda key: (places[key[0]], kinds.get(key[1], 0)))
    return tuple(_operation(graph, graph.program.task(key[0]), found[key]) for key in order)


def _operation(graph: TaskGraph, task: Task, tiles: Sequence[TileTask]) -> Operation:
    first = tiles[0]
    if first.kind not in (*COMPUTES, *MOVES):
        message = f"{task.name}: the persistent kernel has no task for {first.kind}"
        raise UnsupportedError(f"{message}; it has {', '.join(COMPUTES)}", place=task.place)
    # Of a cache one row is written; the queries that share a head are padded.
    extents = {"kv_append": task.tile[1:], "decode_attention": ()}.get(task.kind, task.tile)
    if any(extent & (extent - 1) for extent in extents):
        message = f"{task.name} has tile={task.tile}; the persistent kernel takes powers of two"
        raise ConfigError(message, place=task.place)
    reads = tuple(one.buffer for one in first.reads)
    if first.kind in MOVES:
        # Partial sums of several ranks are one buffer; which rows are whose the body knows.
        reads = tuple(dict.fromkeys(name for one in tiles for access in one.reads
                                    for name in [access.buffer]))  # fmt: skip
        reads = tuple(sorted(reads, key=lambda name: name.endswith("_partials")))
    return Operation(first.kind, task, reads, first.writes[0].buffer, _destination(graph, tiles))


def _destination(graph: TaskGraph, tiles: Sequence[TileTask]) -> str:
    """Which hook of tasks/destinations.py serves all of these."""
    kind = tiles[0].kind
    if kind not in MOVES:
        return "" if kind in WITHOUT else "here"
    if kind == SEND:
        is_owners = all([one.rank for one in tile.writes] == [tile.owner] for tile in tiles)
        return "to_owner" if is_owners else "to_others"
    return "everywhere" if any(len(tile.writes) > 1 for tile in tiles) else "placed"


def bodies(graph: TaskGraph, transposed: Set[str] = frozenset()) -> tuple[Body, ...]:
    """The bodies of a graph's kernel, in the order of their first operations. `transposed` are
    right operands of products that lie as [n, k]."""
    groups: dict[tuple, list[Operation]] = {}
    for one in operations(graph):
        groups.setdefault(_alike(graph, one, transposed), []).append(one)
    names: dict[str, int] = {}
    found = []
    for key, group in groups.items():
        kind, tile, destination, attributes = key[:4]
        name = kind if kind not in MOVES else {REDUCE: "reduce"}.get(kind, kind)
        names[name] = names.get(name, 0) + 1
        name += f"_{names[name]}" if names[name] > 1 else ""
        found.append(Body(name, kind, tile, destination, tuple(group), attributes))
    return tuple(found)


def _alike(graph: TaskGraph, one: Operation, transposed: Set[str]) -> tuple:
    """What operations of one body have in common."""
    rank = graph.ranks[0]
    dtypes = tuple(rank.buffer(name).dtype for name in (*one.reads, one.write))
    tile = one.task.tile
    attributes: dict[str, Any] = {}
    if one.kind == "matmul":
        tile = tile if len(tile) == 3 else (*tile, TILE_K)
        columns = rank.buffer(one.reads[0]).columns
        attributes["b_is_nk"] = one.reads[1] in transposed
        attributes["is_k_even"] = columns % tile[2] == 0
    elif one.kind == "rms_norm":
        attributes["eps"] = one.task.eps
    elif one.kind in ("rope", "decode_attention"):
        attributes["head"] = one.task.head
        if one.task.base is not None:
            attributes["log2_base"] = log2(one.task.base)
    elif one.kind == GATHER:
        attributes["dim"] = one.task.dim
    elif one.kind == REDUCE:
        # Where every rank sums for itself, all round alike.
        is_local = one.destination == "placed" and one.task.kind == "all_reduce"
        attributes["is_rounded"] = is_local and graph.num_ranks > 1
    return one.kind, tile, one.destination, tuple(attributes.items()), dtypes, len(one.reads)
