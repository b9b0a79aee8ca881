"""TTIR as a small tree of operations: what the code generator walks.

`ttir_parser.py` makes it of the text that Triton prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from weft.base.errors import CompileError
from weft.base.place import Place

Chain = tuple[tuple[str, int, int], ...]  # (file, line, column)


@dataclass(frozen=True)
class Type:
    """A TTIR type. `element` is MLIR's word ("f32", "i1"), "ptr", "tensordesc" or "memdesc".

    `shape` is () for scalars; `pointee` is what a pointer points to. A descriptor's `shape` is
    its block's and its `pointee` the block's element; of shared memory likewise.
    """

    text: str
    shape: tuple[int, ...]
    element: str
    pointee: str = ""

    @property
    def is_pointer(self) -> bool:
        return self.element == "ptr"

    @property
    def is_tensor(self) -> bool:
        return self.text.startswith("tensor<")

    @property
    def size(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Value:
    """An SSA value: its name in the text (without %) and its type."""

    name: str
    type: Type


@dataclass(eq=False)
class Block:
    label: str
    args: list[Value]
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Region:
    blocks: list[Block]

    @property
    def args(self) -> list[Value]:
        return self.blocks[0].args

    @property
    def ops(self) -> list[Op]:
        return self.blocks[0].ops

    def walk(self) -> Iterator[Op]:
        """Every operation in it, at any depth, in the order of the text."""
        for block in self.blocks:
            for op in block.ops:
                yield op
                yield from op.inside()


@dataclass(eq=False)
class Op:
    """One operation.

    `words` are the bare words and literals before the types, in order ("slt", "acquire", "42");
    `attributes` everything spelled `name = value`; `strings` the quoted texts. `chain` is the
    place with columns, the innermost call first.
    """

    name: str
    results: list[Value]
    operands: list[Value]
    types: list[Type]
    words: list[str]
    attributes: dict[str, Any]
    strings: list[str]
    successors: list[tuple[str, list[Value]]]
    regions: list[Region]
    place: Place
    text: str
    chain: Chain = ()

    def inside(self) -> Iterator[Op]:
        """Every operation within its regions, at any depth, in the order of the text."""
        for region in self.regions:
            yield from region.walk()

    @property
    def result(self) -> Value:
        return self.results[0]

    def integer(self, name: str, default: int | None = None) -> int:
        """The integer attribute `name`."""
        value = self.attributes.get(name, default)
        if value is None:
            raise CompileError(f"{self.name} without {name}: {self.text}", place=self.place)
        return int(str(value).split(":")[0])

    def flag(self, name: str) -> bool:
        return str(self.attributes.get(name, "false")).split(":")[0].strip() == "true"


@dataclass(eq=False)
class Function:
    """A `tt.func`. `parameters` are its entry block's arguments."""

    name: str
    is_public: bool
    parameters: list[Value]
    result_types: list[Type]
    body: Region
    place: Place


@dataclass(eq=False)
class Module:
    functions: dict[str, Function]
    num_warps: int = 4  # of a program; Triton's TTIR does not say it, whoever launches may
    num_ctas: int = 1  # of a cluster
    layouts: dict[str, str] = field(default_factory=dict)  # of TTGIR, by the names types give them

    @property
    def kernel(self) -> Function:
        """The public function."""
        return next(f for f in self.functions.values() if f.is_public)


# ---------------------------------------------------------------------------------------------
# Types

_EXTENT = re.compile(r"(\d+)x")


@cache
def parse_type(text: str) -> Type:
    """The type spelled `text`: `i32`, `tensor<2x4x!tt.ptr<f32>>`, `!tt.tensordesc<...>`."""
    text = text.strip()
    if text.startswith("tensor<"):
        extents, element = _shaped(text[7:-1])
        element = parse_type(_before_encoding(element))
        return Type(text, extents, element.element, element.pointee)
    if text.startswith("!tt.ptr<"):
        return Type(text, (), "ptr", _before_encoding(text[8:-1]))
    if text.startswith("!ttg.memdesc<"):
        extents, element = _shaped(text[13:-1])
        return Type(text, extents, "memdesc", _before_encoding(element))
    if text.startswith("!tt.tensordesc<"):
        inner = text[15:-1].removeprefix("tensor<")
        extents, element = _shaped(inner)
        return Type(text, extents, "tensordesc", _before_encoding(element).rstrip(">"))
    return Type(text, (), text)


def _shaped(text: str) -> tuple[tuple[int, ...], str]:
    """`2x4xf32` as its extents and the rest."""
    extents: list[int] = []
    while match := _EXTENT.match(text):
        extents.append(int(match[1]))
        text = text[match.end() :]
    return tuple(extents), text


def _before_encoding(text: str) -> str:
    """`text` up to a comma outside brackets: layouts and address spaces are GPU matters."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        if character == "," and depth == 0:
            return text[:position].strip()
    return text.strip()
