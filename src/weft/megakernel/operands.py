"""What an operation gives to its body: buffers and sizes, as expressions by the body's names.

    product = gathered @ w1    ->    x = v.gathered, w = v.w1, m = s.m, n = s.product_n, ...

v are this rank's buffers, s its sizes. A size is named by what it is of: X_m and X_n are extents of
what the rank has of X, X_stride says how far X's rows lie apart, X_slab how many each rank's
summands have, X_part how many columns each rank's full part. Those that must be equal have one
name: of a size that the program calls by name that name, else that of which comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set

from weft.base.parts import full_part
from weft.compiler.passes.tile import held_by, number
from weft.ir.tensor import is_split
from weft.megakernel.bodies import Body, Operation
from weft.megakernel.records import COPY, GATHER, REDUCE, SEND, TaskGraph
from weft.megakernel.tiles import partials_of, result_of

_SIZE, _BUFFER = re.compile(r"\bs\.(\w+)"), re.compile(r"\bv\.(\w+)")
# What Triton's tuples and Python's named ones have by themselves.
TAKEN = {"values", "type", "index", "count"}


def field_of(name: str) -> str:
    """What a value is called in a record of the kernel's."""
    return f"{name}_" if name in TAKEN else f"v{name}" if name.startswith("_") else name


class Operands:
    """What each operation of a kernel's bodies is given, with as few sizes as serve all.

    `rows[i][j]` is of operation j of body i; `buffers` and `sizes` are the kernel's, in order.
    """

    def __init__(
        self, graph: TaskGraph, found: Sequence[Body], transposed: Set[str] = frozenset()
    ) -> None:
        self._graph, self._transposed = graph, transposed
        self.buffers = tuple(dict.fromkeys(
            name for body in found for one in body.operations for name in (*one.reads, one.write)
        ))  # fmt: skip
        self._names: dict[tuple, str] = {}
        self._of: dict[str, str] = {}
        self.rows = [[self._row(one) for one in body.operations] for body in found]
        self.sizes = tuple(self._of)

    def size(self, rank: int, name: str) -> int:
        """A size on a rank, by its name among `sizes`."""
        graph = self._graph
        of, which = self._of[name].rsplit("_", 1)
        if which == "stride":
            buffer = graph.ranks[rank].buffer(of)
            return buffer.rows if of in self._transposed else buffer.columns
        if which == "slab":
            return graph.ranks[rank].buffer(of).rows // graph.num_ranks
        kind = graph.program.task(of).type
        assert kind is not None
        if which == "part":
            return full_part(number(kind.sizes[1], graph.sizes), graph.num_ranks)
        held = held_by(kind, rank, graph.sizes, graph.num_ranks)
        rows, columns = held.end_row - held.first_row, held.end_column - held.first_column
        return rows if which == "m" else columns

    def _row(self, one: Operation) -> dict[str, str]:
        given = {**KINDS[one.kind](one), **_target(one)}
        given = {name: _SIZE.sub(self._named, value) for name, value in given.items()}
        return {
            name: _BUFFER.sub(lambda match: f"v.{field_of(match[1])}", value)
            for name, value in given.items()
        }

    def _named(self, match: re.Match[str]) -> str:
        """The name of all sizes that equal this one."""
        asked = match[1]
        key = self._key(asked)
        if key not in self._names:
            size, sort = key[0], key[1]
            told = {"whole": "{}", "own": "own_{}", "part": "part_{}"}.get(sort, "")
            name = told.format(size) if told and isinstance(size, str) else asked
            self._names[key] = field_of(name if name not in self._of else asked)
            self._of[self._names[key]] = asked
        return f"s.{self._names[key]}"

    def _key(self, name: str) -> tuple:
        """What a size is: (size as the program has it, whole or which part of it)."""
        of, which = name.rsplit("_", 1)
        if which == "slab":
            task = self._graph.program.task(of.removesuffix(partials_of("")))
            return task.type and task.type.sizes[0], f"slab of {task.kind}"
        value = of.removesuffix(partials_of("")) if of.endswith(partials_of("")) else of
        value = value.removesuffix(result_of("")) if of.endswith(result_of("")) else value
        kind = self._graph.program.task(value).type
        assert kind is not None
        dim = 0 if which == "m" or (which == "stride" and of in self._transposed) else 1
        if not is_split(kind.placement, dim) and which != "part":
            return kind.sizes[dim], "whole"
        role = self._graph.ranks[0].buffer(of).role if which == "stride" else "input"
        is_exact = role in ("input", "result") and which != "part"
        return kind.sizes[dim], "own" if is_exact else "part"


def _target(one: Operation) -> dict[str, str]:
    if not one.destination:
        return {}
    out = f"v.{one.write}"
    if one.kind == GATHER and one.task.dim == 1:  # behind the columns of the ranks before
        out += f" + rank * s.{one.task.name}_part"
    return {"out": out, "stride": f"s.{one.write}_stride"}


def _extents(name: str) -> dict[str, str]:
    return {"m": f"s.{name}_m", "n": f"s.{name}_n"}


def _product(one: Operation) -> dict[str, str]:
    x, w = one.reads
    return {
        "x": f"v.{x}", "w": f"v.{w}", "m": f"s.{one.task.name}_m", "n": f"s.{one.task.name}_n",
        "k": f"s.{x}_n", "stride_x": f"s.{x}_stride", "stride_w": f"s.{w}_stride",
    }  # fmt: skip


def _elements(one: Operation) -> dict[str, str]:
    given = {"x": f"v.{one.reads[0]}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{one.reads[0]}_stride"}


def _pairs(one: Operation) -> dict[str, str]:
    x, y = one.reads[0], one.reads[-1]
    given = {"x": f"v.{x}", "y": f"v.{y}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{x}_stride", "stride_y": f"s.{y}_stride"}


def _normed(one: Operation) -> dict[str, str]:
    x, weight = one.reads
    given = {"x": f"v.{x}", "weight": f"v.{weight}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{x}_stride"}


def _moved(one: Operation) -> dict[str, str]:
    (x,) = one.reads
    return {"x": f"v.{x}", "n": f"s.{x}_n", "stride_x": f"s.{x}_stride"}


def _summed(one: Operation) -> dict[str, str]:
    own, partials = one.reads[0], one.reads[-1]
    return {
        "own": f"v.{own}", "own_stride": f"s.{own}_stride", "partials": f"v.{partials}",
        "partials_stride": f"s.{partials}_stride", "slab": f"s.{partials}_slab",
        "n": f"s.{one.task.name}_n",
    }  # fmt: skip


def _turned(one: Operation) -> dict[str, str]:
    x, lengths = one.reads
    given = {"x": f"v.{x}", "lengths": f"v.{lengths}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{x}_stride"}


def _appended(one: Operation) -> dict[str, str]:
    cache, x, lengths = one.reads
    return {
        "cache": f"v.{cache}", "x": f"v.{x}", "lengths": f"v.{lengths}", "n": f"s.{x}_n",
        "max_kv": f"s.{cache}_m // s.{x}_m", "stride_x": f"s.{x}_stride",
        "stride": f"s.{cache}_stride",
    }  # fmt: skip


def _attended(one: Operation) -> dict[str, str]:
    q, k, v, lengths = one.reads
    return {
        "q": f"v.{q}", "keys": f"v.{k}", "values": f"v.{v}", "lengths": f"v.{lengths}",
        **_extents(one.task.name), "kv_n": f"s.{k}_n", "max_kv": f"s.{k}_m // s.{one.task.name}_m",
        "out": f"v.{one.write}",
    }  # fmt: skip


KINDS: dict[str, Callable[[Operation], dict[str, str]]] = {
    "matmul": _product, "silu": _elements, "silu_mul": _elements,
    "silu_mul_halves": _elements, "mul": _pairs, "add": _pairs,
    "rms_norm": _normed, "rope": _turned, "kv_append": _appended, "decode_attention": _attended,
    GATHER: _moved, SEND: _moved, COPY: _moved, REDUCE: _summed,
}  # fmt: skip
