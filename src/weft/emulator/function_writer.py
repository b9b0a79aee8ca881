"""One function of TTIR as lines of Python on numpy.

A tile is held as small as numpy's broadcasting allows: a splat stays a scalar, a row stays a row.
The writer knows the extents each value is held with ("phys": () for a scalar) and fills a value up
only where an operation needs every element. Index arithmetic is numpy scalars, which wrap as the
machine's integers do and cost as much as Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from weft.base.errors import UnsupportedError
from weft.base.place import Place
from weft.emulator import numerics
from weft.emulator.operations import OPERATIONS
from weft.emulator.operations.control import TERMINATORS
from weft.emulator.operations.gluon import in_flight, looks_at
from weft.emulator.operations.indexing import Affine, Boxed, Text
from weft.ir.ttir import Function, Op, Region, Type, Value, parse_type

Phys = tuple[int, ...]

# The operations that take scalars of which each thread has its own.
PER_THREAD = (
    "arith.", "math.", "scf.", "tt.addptr", "tt.int_to_ptr", "tt.ptr_to_int", "tt.bitcast",
    "tt.load", "tt.elementwise_inline_asm", "tt.mulhiui", "tt.print", "tt.assert",
)  # fmt: skip


class Pending:
    """A place among the lines that is filled in if somebody needs what it can compute."""

    def __init__(self, code: FunctionWriter) -> None:
        self.code = code
        self.depth = code.depth
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def name(self, value: Value, suffix: str, text: Text) -> Text:
        """`text` itself where it is a number or a name, else a variable that holds it."""
        if isinstance(text, int) or text.isidentifier():
            return text
        variable = self.code.variable(value, suffix)
        self.add(f"{variable} = {text}")
        return variable

    def between(self, value: Value, suffix: str, text: Text, extent: int) -> Text:
        """`text` kept within 0 .. extent."""
        if isinstance(text, int):
            return min(max(text, 0), extent)
        edge = self.code.variable(value, suffix)
        self.add(f"{edge} = {text}")
        self.add(f"{edge} = 0 if {edge} < 0 else {extent} if {edge} > {extent} else {edge}")
        return edge

    def lazy(self, variable: str, make: Callable[[], str]) -> Callable[[], str]:
        """A variable that is assigned, here, if somebody asks for it."""

        def get() -> str:
            self.add(f"{variable} = {make()}")
            return variable

        return cache(get)

    def larger(self, value: Value, suffix: str, a: Text, b: Text) -> Text:
        return self._choose(value, suffix, a, b, ">", max)

    def smaller(self, value: Value, suffix: str, a: Text, b: Text) -> Text:
        return self._choose(value, suffix, a, b, "<", min)

    def _choose(self, value, suffix: str, a: Text, b: Text, sign: str, known: Callable) -> Text:
        if isinstance(a, int) and isinstance(b, int):
            return known(a, b)
        if a == b or (a == 0 and sign == ">"):
            return b
        return self.name(value, suffix, f"{a} if {a} {sign} {b} else {b}")


@dataclass(frozen=True)
class Held:
    """How a value is held: a name, the extents behind it, and what else is known of it.

    `known` is its number, `affine` and `box` its form as integers, `integer` a scalar as Python's.
    """

    name: str | Callable[[], str]
    phys: Phys
    known: Any = None
    affine: Affine | None = None
    box: Boxed | None = None
    integer: Callable[[], str] | None = None


class FunctionWriter:
    """Writes one function. The emitters in `operations/` speak to this."""

    def __init__(self, names: Any, function: Function) -> None:
        """`names` is the module's Namespace (codegen.py)."""
        self.names = names
        self.function = function
        self.lines: list[str | Pending] = []
        self.depth = 0
        self.held: dict[Value, Held] = {}
        self.blocks: dict[str, Any] = {}
        self.among_blocks = False  # in a region whose blocks jump to each other
        self.num_warps = names.num_warps  # of the partition that is written
        self.in_flight = in_flight(function)
        ops = list(function.body.walk())
        self.used = {value for op in ops for value in op.operands}
        self.used |= {value for op in ops for _, given in op.successors for value in given}
        self.vector = False  # in a combining function: scalars by type, tiles in truth
        self.place = function.place
        self.commented: tuple[str, int] | None = None

    def text(self) -> str:
        function = self.function
        for parameter in function.parameters:
            self.bind(parameter, parameter.type.shape if parameter.type.is_tensor else ())
        names = ", ".join(["rt", *(self.expr(value) for value in function.parameters)])
        self.line(f"def {self.names.functions[function.name]}({names}):")
        with self.indented():
            for parameter in function.parameters:
                self.also_as_integer(parameter)
            if len(function.body.blocks) == 1:
                self.ops(function.body.ops)
            else:
                self.graph(function.body.blocks)
        return "\n".join(_with_bodies(self.flat())) + "\n"

    def flat(self) -> Iterator[str]:
        """The lines, with what was needed of the pending ones."""
        for line in self.lines:
            yield from line.lines if isinstance(line, Pending) else (line,)

    def graph(self, blocks: list) -> None:
        """Blocks that jump to each other: a loop over the number of the next block."""
        numbers = {block.label: index for index, block in enumerate(blocks)}
        self.blocks = {block.label: (numbers[block.label], block) for block in blocks}
        for block in blocks[1:]:
            for arg in block.args:
                self.bind(arg, arg.type.shape if arg.type.is_tensor else ())
        self.line("block_ = 0")
        turns = self.turn_counter(blocks[0].ops[-1])
        self.line("while True:")
        with self.indented():
            self.count_turn(turns, blocks[0].ops[-1])
            for index, block in enumerate(blocks):
                self.line(f"{'el' if index else ''}if block_ == {index}:")
                with self.indented():
                    self.commented = None
                    self.ops(block.ops)

    def turn_counter(self, op: Op) -> str:
        """A variable that counts how often a loop goes round, from here on."""
        turns = self.names.identifier(self.function.name, ("turns", id(op)), "turns")
        self.line(f"{turns} = 0")
        return turns

    def count_turn(self, turns: str, op: Op) -> None:
        """One more turn; the runtime hears of every 65536th."""
        self.line(f"{turns} += 1")
        self.line(f"if not {turns} & 65535:")
        self.line(f"    rt.turned({turns}, {self.loc(op)})")

    def jump(self, label: str, values: list[Value]) -> None:
        number, block = self.blocks[label]
        if values:
            left = ", ".join(self.expr(arg) for arg in block.args)
            self.line(f"{left} = {', '.join(self.full(value) for value in values)}")
        if len(block.ops) == 1 and block.ops[0].name == "tt.return" and not values:
            self.emit(block.ops[0])
            return
        self.line(f"block_ = {number}")
        self.line("continue")

    # -- lines

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def mark(self) -> tuple[int, Any]:
        return len(self.lines), self.commented

    def rollback(self, mark: tuple[int, Any]) -> None:
        length, self.commented = mark
        del self.lines[length:]

    def pending(self) -> Pending:
        self.lines.append(Pending(self))
        return self.lines[-1]

    def comment(self, place: Place) -> None:
        """The user's line, once, above what it became; a helper's line rather than its call."""
        frames = [frame for frame in place.frames if "/triton/language/" not in frame.file]
        if not frames or (frames[-1].file, frames[-1].line) == self.commented:
            return
        frame = frames[-1]
        self.commented = (frame.file, frame.line)
        self.line(f"# {frame.file.rsplit('/', 1)[-1]}:{frame.line}: {frame.source()}")

    # -- operations

    def ops(self, ops: list[Op]) -> list[Value]:
        """Write operations in order; returns what their block hands on at its end."""
        for op in ops:
            self.emit(op)
        return ops[-1].operands if ops and ops[-1].name in TERMINATORS else []

    def emit(self, op: Op) -> None:
        if op.place.frames:
            self.place = op.place
        emit = OPERATIONS.get(op.name)
        if emit is None:
            raise UnsupportedError(
                f"the emulator does not know the operation {op.name}; "
                "docs/emulator.md lists those it does",
                place=self.place,
            )
        if op.name != "arith.constant":
            self.comment(op.place)
        if any(map(self.is_per_thread, op.operands)) and not op.name.startswith(PER_THREAD):
            raise UnsupportedError(
                f"{op.name} is given a number that each thread of a program has its own of, from"
                " %tid or an atomic access in inline assembly; the emulator follows such numbers"
                " through arithmetic, conditions, scalar loads and assembly only",
                place=self.place,
            )
        for value in looks_at(op, self.in_flight):
            self.line(f"rt.settled({self.expr(value)}, {self.loc(op)})")
        emit(self, op)

    def loc(self, op: Op) -> int:
        return self.names.location(op.place if op.place.frames else self.place)

    # -- values

    def identifier(self, value: Value) -> str:
        return self.names.identifier(self.function.name, value.name, value.name)

    def variable(self, value: Value, suffix: str) -> str:
        """A variable beside that of `value`."""
        return self.names.identifier(
            self.function.name, (value.name, suffix), f"{value.name}_{suffix}"
        )

    def bind(self, value: Value, phys: Phys) -> None:
        """Declare that `value` lives in a variable of its own."""
        self.held[value] = Held(self.identifier(value), tuple(phys))

    def set(self, value: Value, text: str, phys: Phys | None = None) -> None:
        """`value` = text; held in full unless `phys` says otherwise."""
        self.bind(value, value.type.shape if phys is None else phys)
        self.line(f"{self.held[value].name} = {text}")
        self.also_as_integer(value)

    def set_lazy(
        self, value: Value, make: Callable[[], str], phys: Phys,
        affine: Affine | None = None, box: Boxed | None = None,
    ) -> None:  # fmt: skip
        """`value` = make(), if somebody wants all of it and not its form as integers."""
        name = self.pending().lazy(self.identifier(value), make)
        self.held[value] = Held(name, tuple(phys), affine=affine, box=box)

    def also_as_integer(self, value: Value) -> None:
        """Let a scalar be had as a Python integer too, from here on."""
        held = self.held[value]
        if held.phys or self.vector or not self.is_integer(value):
            return
        variable = self.variable(value, "int")
        integer = self.pending().lazy(variable, lambda: f"int({held.name})")
        self.held[value] = replace(held, integer=integer)

    def is_integer(self, value: Value) -> bool:
        return value.type.element in ("i8", "i16", "i32", "i64", "index", "ptr")

    def is_per_thread(self, value: Value) -> bool:
        """Is this scalar held as a vector, because each thread of the program has its own?"""
        return self.phys(value) != () and not value.type.is_tensor and not self.vector

    def integer(self, value: Value) -> Text:
        """A scalar as a Python integer: its number, or the name of a variable."""
        held = self.held[value]
        if held.known is not None:
            return int(held.known)
        return held.integer() if held.integer is not None else f"int({self.expr(value)})"

    def set_many(self, values: list[Value], text: str) -> None:
        for value in values:
            self.bind(value, value.type.shape)
        names = ", ".join(self.expr(value) for value in values)
        self.line(f"{names} = {text}" if values else text)
        for value in values:
            self.also_as_integer(value)

    def set_constant(self, value: Value, number: Any, affine: Affine | None = None) -> None:
        self.held[value] = Held(self.constant(number), np.shape(number), number, affine)

    def alias(self, value: Value, other: Value) -> None:
        """`value` is what `other` is, under another type."""
        self.held[value] = self.held[other]

    def constant(self, number: Any) -> str:
        """A global that holds `number`."""
        return self.names.constant(number, _constant_name(number))

    def expr(self, value: Value) -> str:
        name = self.held[value].name
        return name if isinstance(name, str) else name()

    def phys(self, value: Value) -> Phys:
        return self.held[value].phys

    def known(self, value: Value) -> Any:
        """The number behind `value` where the code generator knows it, else None."""
        return self.held[value].known

    def shaped(self, value: Value, phys: Phys) -> str:
        """`value` held with the extents `phys`."""
        held = self.held[value]
        if held.phys == phys:
            return self.expr(value)
        if held.known is not None:
            return self.constant(np.broadcast_to(held.known, phys))
        return f"np.broadcast_to({self.expr(value)}, {phys})"

    def full(self, value: Value) -> str:
        """`value` with every element of its type."""
        if self.vector:
            return self.expr(value)
        return self.shaped(value, value.type.shape if value.type.is_tensor else ())

    def join(self, *shapes: Phys) -> Phys:
        """The extents of what numpy makes of operands with these."""
        return np.broadcast_shapes(*shapes)

    def mask(self, value: Value | None) -> str:
        """A mask; None where every element is known to be on."""
        if value is None or (self.known(value) is not None and np.all(self.known(value))):
            return "None"
        return self.expr(value)

    # -- types

    def dtype(self, value: Value) -> str:
        """The global that holds the numpy dtype of `value`'s elements."""
        return self.element(value.type)

    def element(self, kind: Type) -> str:
        return self.constant_dtype(self.numpy_dtype(kind.element))

    def pointee(self, value: Value) -> np.dtype:
        """The dtype of what the pointer `value` points to."""
        return self.numpy_dtype(parse_type(value.type.pointee).element)

    def numpy_dtype(self, word: str) -> np.dtype:
        if word not in numerics.DTYPES:
            raise UnsupportedError(
                f"the emulator has no element type {word}; it knows {', '.join(numerics.DTYPES)}",
                place=self.place,
            )
        return numerics.DTYPES[word]

    def constant_dtype(self, dtype: np.dtype) -> str:
        return DTYPE_NAMES[dtype]

    def unsigned(self, text: str, value: Value) -> str:
        """`text`, an expression of `value`'s dtype, read as unsigned."""
        dtype = self.dtype(value)
        return f"{text}.view(u{dtype[1:]})"

    # -- shapes of code

    def elementwise(
        self, op: Op, template: str, affine: Affine | None = None, box: Boxed | None = None
    ) -> None:
        """One result, element by element, from a template (see operations/arithmetic.py).

        Where the result has a form as integers, the tile is computed only if it is needed.
        """

        def text() -> str:
            names = [self.expr(operand) for operand in op.operands]
            fields = {"dtype": self.dtype(op.result)}
            for index, operand in enumerate(op.operands):
                if f"{{u{index}}}" in template:
                    fields[f"u{index}"] = self.unsigned(names[index], operand)
            return template.format(*names, **fields)

        phys = self.join(*(self.phys(operand) for operand in op.operands))
        if affine is not None or box is not None:
            self.set_lazy(op.result, text, phys, affine, box)
        else:
            self.set(op.result, text(), phys)

    def combine(self, op: Op) -> str:
        """The function in a reduction's region, on tiles."""
        if _branches(op):
            return f"by_element({self.region_function(op, vector=False)})"
        return self.region_function(op, vector=True)

    def region_function(self, op: Op, vector: bool) -> str:
        """Write the region of `op` as a nested function; returns its name."""
        name = self.names.identifier(
            self.function.name, id(op), f"{op.name.split('.')[-1]}_function"
        )
        before, self.vector = self.vector, vector
        self.nested(name, op.regions[0])
        self.vector = before
        return name

    def nested(self, name: str, region: Region, *leading: str) -> None:
        """Write a region as a function within this one, of the `leading` and of its arguments."""
        for arg in region.args:
            self.bind(arg, arg.type.shape if arg.type.is_tensor else ())
        self.line(f"def {name}({', '.join([*leading, *map(self.expr, region.args)])}):")
        with self.indented():
            if leading:
                for arg in region.args:
                    self.also_as_integer(arg)
            if len(region.blocks) > 1:
                outer, self.among_blocks = (self.blocks, self.among_blocks), True
                self.graph(region.blocks)
                self.blocks, self.among_blocks = outer
            else:
                values = self.ops(region.ops)
                self.line(f"return {', '.join(self.expr(value) for value in values)}".rstrip())


def _with_bodies(lines: Iterator[str]) -> Iterator[str]:
    """The lines, with a `pass` where a block is empty, less the comments with nothing below."""
    opened: int | None = None
    comment: str | None = None
    for line in lines:
        if line.lstrip().startswith("#"):
            comment = line
            continue
        depth = _depth(line)
        if opened is not None and depth <= opened:
            yield " " * (opened + 4) + "pass"
        if comment is not None and _depth(comment) == depth:
            yield comment
        yield line
        comment, opened = None, depth if line.endswith(":") else None
    if opened is not None:
        yield " " * (opened + 4) + "pass"


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _branches(op: Op) -> bool:
    """Does a function of scalars do what differs from one to the next, or make tiles of them?"""
    region = op.regions[0]
    return len(region.blocks) > 1 or any(
        inner.regions
        or inner.name == "tt.call"
        or any(result.type.is_tensor for result in inner.results)
        for inner in region.ops
    )


def _constant_name(number: Any) -> str:
    """`c16_i32`, `c_minus_1_i64`, `range_0_32`, `tile_16x16_f32`."""
    array = np.asarray(number)
    word = DTYPE_NAMES[array.dtype]
    if array.ndim == 0:
        text = str(number).replace("-", "_minus_").replace("+", "").replace(".", "_")
        return f"c{text}_{word}"
    steps = np.arange(array.size) if array.dtype == np.int32 else None
    if array.ndim == 1 and steps is not None and np.array_equal(array - array[0], steps):
        return f"range_{array[0]}_{array[-1] + 1}"
    return f"tile_{'x'.join(map(str, array.shape))}_{word}"


DTYPE_NAMES = {
    dtype: name for name, dtype in numerics.DTYPES.items() if name not in ("ptr", "index")
}
