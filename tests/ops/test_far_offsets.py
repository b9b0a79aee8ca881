"""No kernel multiplies a number of rows by a row's length in 32 bits: a rank's shard of 131072 rows
of 16384 elements has 2^31 of them.

Read in TTIR, where the emulator's front end leaves each kernel of each operator: a value is of rows
or of columns by the names of the arguments that it comes from, through sums, minima, branches and
loops; what is divided, as tiles are counted, is neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import triton
import triton.language as tl

from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.ir import ttir_parser
from weft.ir.ttir import Function, Op, Region, Value
from weft.language import triton_api
from weft.ops import cards

EMU = TARGETS["emu"]
ROWS = {"m", "rows", "chunk_rows", "rank_rows", "tokens", "max_kv", "capacity", "token_of"}
COLUMNS = {
    "n", "k", "row", "columns", "stride_a", "stride_b", "stride_c", "kv_stride", "q_stride",
    "stride", "width",
}  # fmt: skip
KEEP = {
    "arith.addi", "arith.subi", "arith.minsi", "arith.maxsi", "arith.select", "arith.extsi",
    "arith.extui", "arith.trunci", "arith.index_cast", "tt.splat", "tt.broadcast",
    "tt.expand_dims", "tt.reshape", "tt.addptr", "tt.load", "arith.muli",
}  # fmt: skip


def leaves(record: KernelRecord) -> Iterator[str]:
    """Arguments as TTIR has them, one behind the other: of records their fields."""
    for name, kind in record.signature.items():
        yield from _leaves(name, kind, record.constants.get(name))


def _leaves(name: str, kind: Any, constant: Any) -> Iterator[str]:
    if isinstance(kind, (list, tuple)):
        fields = getattr(constant, "_fields", (name,) * len(kind))
        inner = constant if isinstance(constant, tuple) else (None,) * len(kind)
        for one, word, value in zip(fields, kind, inner, strict=True):
            yield from _leaves(one, word, value)
        return
    if kind != "constexpr":
        yield name
    if kind.startswith("tensordesc"):  # its extents and strides
        yield from ("m", "n", "stride", "stride")


class Products:
    """Where a function multiplies rows by columns in 32 bits."""

    def __init__(self, function: Function, names: list[str]) -> None:
        self.of: dict[Value, frozenset[str]] = {}
        self.found: set[str] = set()
        for value, name in zip(function.parameters, names, strict=True):
            kinds = {"rows"} if name in ROWS else {"columns"} if name in COLUMNS else set()
            self.of[value] = frozenset(kinds)
        for _ in range(2):  # what a loop hands on is known the second time
            self.walk(function.body)

    def kinds(self, *values: Value) -> frozenset[str]:
        return frozenset().union(*(self.of.get(value, frozenset()) for value in values))

    def walk(self, region: Region) -> None:
        for block in region.blocks:
            for op in block.ops:
                self.visit(op)

    def visit(self, op: Op) -> None:
        for region in op.regions:
            self.enter(op, region)
            self.walk(region)
            ends = region.blocks[-1].ops[-1:] if region.blocks else []
            handed = [value for end in ends for value in end.operands]
            for i, result in enumerate(op.results):
                if i < len(handed):
                    self.of[result] = self.kinds(result, handed[i])
            for i, carried in enumerate(region.args[1:] if op.name == "scf.for" else []):
                if i < len(handed):
                    self.of[carried] = self.kinds(carried, handed[i])
        if op.regions or not op.results or op.name not in KEEP:
            return
        kinds = self.kinds(*op.operands)
        is_32 = op.result.type.element == "i32"
        if op.name == "arith.muli" and kinds == {"rows", "columns"} and is_32:
            first, second = (self.kinds(one) for one in op.operands)
            if first and second:
                self.found.add(str(op.place.innermost))
        self.of[op.result] = kinds

    def enter(self, op: Op, region: Region) -> None:
        """A loop's arguments: its variable is of what bounds it, the others of where they begin."""
        if op.name == "scf.for":
            self.of[region.args[0]] = self.kinds(*op.operands[:2])
            for carried, begin in zip(region.args[1:], op.operands[3:]):
                self.of[carried] = self.kinds(carried, begin)


def products_of(fn: Any, record: KernelRecord) -> set[str]:
    text = triton_api.compile_kernel(fn, record, EMU).asm["ttir"]
    return Products(ttir_parser.parse(text).kernel, list(leaves(record))).found


def kernels(op: Any) -> Iterator[tuple[Any, KernelRecord]]:
    """Those of every transport, plain."""
    done = set()
    for nodes in ((4,), (2, 2)) if op.takes_nodes else ((4,),):
        problem = op.make_problem(4, op.default_shape, "bfloat16", nodes)
        for config in op.candidates(problem, EMU):
            if (nodes, config.transport) not in done:
                done.add((nodes, config.transport))
                found = op.kernels(problem, config, EMU)
                yield from (one for one in found if isinstance(one[0], triton.JITFunction))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(cards()))
def test_offsets_have_64_bits(name):
    found = {
        str(place) for fn, record in kernels(cards()[name]) for place in products_of(fn, record)
    }
    assert not found, f"{name} multiplies rows by columns in 32 bits at {sorted(found)}"


@triton.jit
def short(x, m, n):
    end = tl.minimum(m, 7)
    for i in range(0, end):
        tl.store(x + i * n, 0.0)


@triton.jit
def long(x, m, n):
    for i in range(0, m):
        tl.store(x + i.to(tl.int64) * n + tl.cdiv(m, 16) * n, 0.0)


@pytest.mark.parametrize(("fn", "is_found"), [(short, True), (long, False)])
def test_what_is_looked_for(fn, is_found):
    signature = {"x": "*fp32", "m": "i32", "n": "i32"}
    record = KernelRecord(fn.__name__, signature, {}, {}, ("x",))
    assert bool(products_of(fn, record)) == is_found
