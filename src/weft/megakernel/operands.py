"""What an operation gives to its body: buffers and sizes, as expressions by the body's names.

    product = gathered @ w1    ->    x = v.gathered, w = v.w1, m = s.m, n = s.product_n, ...

v are this rank's buffers, s its sizes. A size is named by what it is of: X_m and X_n are extents of
what the rank has of X, X_stride says how far X's rows lie apart, X_slab how many each rank's
summands have, or each part of a product that is split along k, X_part how many columns each rank's
full part. Those that must be equal have one name: of a size that the program calls by name that
name, else that of which comes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from weft.base.parts import full_part
from weft.compiler.passes.tile import held_by, number
from weft.ir.tensor import is_split
from weft.megakernel.bodies import Body, Operation
from weft.megakernel.forms import KINDS
from weft.megakernel.records import GATHER, TaskGraph
from weft.megakernel.tiles import ADDS_PARTS, partials_of, result_of

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
            name for body in found for one in body.operations
            for name in (*one.reads, one.write, *([one.partials] if one.partials else []))
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
            rows = graph.ranks[rank].buffer(of).rows
            is_summed = of.endswith(partials_of(""))
            return rows // (graph.num_ranks if is_summed else graph.program.task(of).split_k)
        kind = graph.program.task(of).type
        assert kind is not None
        if which == "part":
            return full_part(number(kind.sizes[1], graph.sizes), graph.num_ranks)
        return held_by(kind, rank, graph.sizes, graph.num_ranks).extents[which != "m"]

    def _row(self, one: Operation) -> dict[str, str]:
        words = {"made": one.task.name, "write": one.write, "last": one.reads[-1]}
        given = {
            name: text.format(*one.reads, **words) for name, text in KINDS[one.kind].names.items()
        }
        given |= _target(one)
        if (place := ADDS_PARTS.get(one.kind)) is not None:
            if self._graph.program.task(one.task.operands[place]).split_k > 1:
                given["part_stride"] = _part_stride(one.reads[place])
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
            form = {"whole": "{}", "own": "own_{}", "part": "part_{}"}.get(sort, "")
            name = form.format(size) if form and isinstance(size, str) else asked
            self._names[key] = field_of(name if name not in self._of else asked)
            self._of[self._names[key]] = asked
        return f"s.{self._names[key]}"

    def _key(self, name: str) -> tuple:
        """What a size is: (size as the program has it, whole or which part of it)."""
        of, which = name.rsplit("_", 1)
        if which == "slab":
            task = self._graph.program.task(of.removesuffix(partials_of("")))
            assert task.type is not None
            if not of.endswith(partials_of("")):
                return task.type.sizes[0], "part" if is_split(task.type.placement, 0) else "whole"
            split = self._graph.program.task(task.operands[0]).split_k
            return task.type.sizes[0], f"slab of {task.kind}", task.engine, split
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


def _part_stride(buffer: str) -> str:
    """How far one part of a product lies from the next, in elements."""
    return f"s.{buffer}_slab * s.{buffer}_stride"


def _target(one: Operation) -> dict[str, str]:
    if not one.destination:
        return {}
    out = f"v.{one.write}"
    if one.task.split_k > 1:
        out += f" + task.part * ({_part_stride(one.write)})"
    if one.partials:
        partials, stride = f"v.{one.partials}", f"s.{one.partials}_stride"
        if one.task.split_k > 1:
            partials += f" + task.part * (s.{one.write}_slab * {stride})"
        return {"out": out, "stride": f"s.{one.write}_stride", "partials": partials,
                "partials_stride": stride, "slab": f"s.{one.partials}_slab"}  # fmt: skip
    if one.kind == GATHER and one.task.dim == 1:  # behind the columns of the ranks before
        out += f" + rank * s.{one.task.name}_part"
    return {"out": out, "stride": f"s.{one.write}_stride"}
