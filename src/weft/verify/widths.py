"""How wide stores are: what was emitted, and what the source's pointers allow.

What they allow is read from TTIR with the analysis by which Triton chooses: for each value and
dimension, how many neighbours are contiguous, by which power of two the first of them is
divisible, how many are equal. One thing is known here that Triton is told only by a hint: the
difference of two 64-bit addresses loaded from a table, as `wl.at` computes it, is a distance
between heaps, which begin on pages.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from weft.verify import amdgcn, machine, ptx
from weft.verify.events import base_name
from weft.verify.places import Loc, is_known, key_of
from weft.verify.ttgir import Function, Module, Operation

FULL = 16
PAGE = 4096
ANY = 1 << 30

_TENSOR = re.compile(r"tensor<((?:\d+x)+)([^,>]*(?:<[^>]*>)?)")
_BITS = re.compile(r"(?:b?f|i)(\d+)")
_HINT = re.compile(r"tt\.(contiguity|divisibility|constancy) = dense<(\d+|\[[\d, ]+\])>")


_SAME_AXES = ("arith.extsi", "arith.extui", "arith.trunci", "arith.bitcast", "tt.bitcast",
              "tt.int_to_ptr", "ttg.convert_layout")  # fmt: skip


@dataclass(frozen=True)
class Store:
    """A tile store and the bytes that one instruction of it could move."""

    operation: Operation
    num_bytes: int


def emitted(program: machine.Program) -> dict[Loc, int]:
    """The narrowest store instruction to global memory of each place."""
    found: dict[Loc, int] = {}
    for one in program.instructions:
        if isinstance(one, ptx.Instruction):
            is_store = one.base == "st" and one.is_global
        else:
            is_store = isinstance(one, amdgcn.Instruction) and one.is_store
        if is_store and is_known(one.loc) and one.bytes:
            found[one.loc] = min(found.get(one.loc, ANY), one.bytes)
    return found


def expected(function: Function, module: Module | None) -> list[Store]:
    """The tile stores that could be 16 bytes wide: contiguous, aligned, enough per thread."""
    if module is None:
        return []
    analysis = _Analysis(function)
    layouts = {
        key_of(operation.loc): operation.text
        for operation in module.kernel.walk()
        if base_name(operation) in ("store", "buffer_store")
    }
    found = []
    for operation in function.walk():
        if operation.name != "tt.store" or "tensor<" not in operation.text:
            continue
        match = _TENSOR.search(operation.text)
        bits = _BITS.search(match[2]) if match else None
        if match is None or bits is None:
            continue
        item_bytes = max(int(bits[1]) // 8, 1)
        if analysis.store_bytes(operation, item_bytes) < FULL:
            continue
        text = layouts.get(key_of(operation.loc), "")
        if (
            _has_blocked_layout(text, module.text)
            and _bytes_per_thread(match[1], item_bytes, module.text) >= FULL
        ):
            found.append(Store(operation, FULL))
    return found


def _has_blocked_layout(text: str, module: str) -> bool:
    """Is the store's layout one that Triton chose for the sake of its addresses?"""
    names = re.findall(r"#[\w]+", text.split(" loc(")[0])
    return bool(names) and f"{names[-1]} = #ttg.blocked" in module


def _bytes_per_thread(shape: str, item_bytes: int, module: str) -> int:
    warps = re.search(r'"ttg\.num-warps" = (\d+)', module)
    lanes = re.search(r'"ttg\.threads-per-warp" = (\d+)', module)
    num_threads = (int(warps[1]) if warps else 4) * (int(lanes[1]) if lanes else 32)
    count = math.prod(int(extent) for extent in shape.split("x") if extent)
    return count * item_bytes // num_threads


@dataclass(frozen=True)
class Axes:
    """Per dimension: runs of contiguous neighbours, what their first is divisible by (bytes for
    pointers), runs of equal neighbours."""

    contiguity: tuple[int, ...]
    divisibility: tuple[int, ...]
    constancy: tuple[int, ...]

    def join(self, other: Axes) -> Axes:
        return Axes(
            _gcds(self.contiguity, other.contiguity),
            _gcds(self.divisibility, other.divisibility),
            _gcds(self.constancy, other.constancy),
        )


UNKNOWN_SCALAR = Axes((1,), (1,), (1,))


def _gcds(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if len(left) != len(right):
        return (1,) * max(len(left), len(right))
    return tuple(map(math.gcd, left, right))


def _power(value: int) -> int:
    """The largest power of two that divides `value`."""
    return ANY if value == 0 else min(value & -value, ANY)


class _Analysis:
    """Axes of a function's values, computed on demand; loops by repetition."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.known: dict[str, Axes] = {}
        self.open: set[str] = set()

    def store_bytes(self, store: Operation, item_bytes: int) -> int:
        pointer = self.of(store.operands[0])
        widest = max(range(len(pointer.contiguity)), key=lambda dim: pointer.contiguity[dim])
        run = min(
            pointer.contiguity[widest] * item_bytes, math.gcd(pointer.divisibility[widest], FULL)
        )
        if len(store.operands) > 2:
            mask = self.of(store.operands[2])
            run = min(run, mask.constancy[min(widest, len(mask.constancy) - 1)] * item_bytes)
        return run

    def of(self, value: str) -> Axes:
        if value in self.known:
            return self.known[value]
        if value in self.open:
            return UNKNOWN_SCALAR
        self.open.add(value)
        axes = self._compute(value)
        self.open.discard(value)
        self.known[value] = axes
        return axes

    def _compute(self, value: str) -> Axes:
        function = self.function
        if value in function.arguments:
            attributes = function.argument_attributes[function.arguments.index(value)]
            match = re.search(r"tt\.divisibility = (\d+)", attributes)
            return Axes((1,), (int(match[1]) if match else 1,), (1,))
        operation = function.definitions.get(value)
        if value in function.sources:
            return self._carried(value, operation)
        if operation is None:
            return UNKNOWN_SCALAR
        return self._hinted(operation, self._result(operation))

    def _carried(self, value: str, operation: Operation | None) -> Axes:
        """A loop's value: its start, weakened by what a round does to it."""
        sources = self.function.sources[value]
        if operation is not None and operation.name == "scf.if":
            sources = sources[1:]
        if len(sources) == 3 and operation is None:
            # An induction variable: lower bound, upper bound, step.
            lower, step = self.of(sources[0]), self.of(sources[2])
            return Axes((1,), _gcds(lower.divisibility, step.divisibility), (1,))
        axes = self.of(sources[0]) if sources else UNKNOWN_SCALAR
        for _ in range(4):
            inner = _Analysis(self.function)
            inner.known = {**self.known, value: axes}
            joined = axes
            for source in sources[1:]:
                joined = joined.join(inner.of(source))
            if joined == axes:
                break
            axes = joined
        return axes

    def _hinted(self, operation: Operation, axes: Axes) -> Axes:
        for kind, text in _HINT.findall(operation.text):
            values = tuple(int(number) for number in re.findall(r"\d+", text))
            old = getattr(axes, kind)
            if len(values) == len(old):
                new = tuple(map(max, old, values))
                axes = Axes(**{**axes.__dict__, kind: new})
        return axes

    def _result(self, operation: Operation) -> Axes:
        name = operation.name
        shape = _shape(operation.text)
        inputs = operation.operands
        if name == "arith.constant":
            return self._constant(operation, shape)
        if name == "tt.make_range":
            start = int((operation.attribute("start") or "0").split(" ")[0])
            return Axes((shape[0],), (_power(start),), (1,))
        if name == "tt.splat":
            divisibility = self.of(inputs[0]).divisibility[0]
            return Axes((1,) * len(shape), (divisibility,) * len(shape), tuple(shape))
        if name == "tt.expand_dims":
            return self._expand(operation)
        if name == "tt.broadcast":
            return self._broadcast(operation, shape)
        if name in _SAME_AXES:
            return self.of(inputs[0])
        if name == "tt.ptr_to_int":
            axes = self.of(inputs[0])
            return Axes((1,) * len(axes.contiguity), axes.divisibility, axes.constancy)
        if name in ("arith.addi", "arith.subi", "tt.addptr"):
            return self._add(operation)
        if name == "arith.muli":
            return self._multiply(*map(self.of, inputs))
        if name == "arith.divsi":
            return self._divide(self.of(inputs[0]), self.of(inputs[1]), inputs[1])
        if name in ("arith.remsi", "arith.remui"):
            return self._remainder(*map(self.of, inputs))
        if name == "arith.cmpi":
            return self._compare(operation, *map(self.of, inputs))
        if name in ("arith.andi", "arith.ori", "arith.select", "arith.maxsi", "arith.minsi"):
            axes = self.of(inputs[-1])
            for value in inputs[:-1]:
                other = self.of(value)
                if len(other.contiguity) == len(axes.contiguity):
                    axes = axes.join(other)
            return Axes((1,) * len(axes.contiguity), axes.divisibility, axes.constancy)
        rank = max(len(shape), 1)
        return Axes((1,) * rank, (1,) * rank, (1,) * rank)

    def _constant(self, operation: Operation, shape: list[int]) -> Axes:
        match = re.match(r"arith\.constant (?:dense<)?(-?\d+|true|false)\b(?!\.)", operation.text)
        word = match[1] if match else "1"
        value = int({"true": "1", "false": "0"}.get(word, word))
        rank = max(len(shape), 1)
        return Axes((1,) * rank, (_power(abs(value)),) * rank, tuple(shape) or (1,))

    def _expand(self, operation: Operation) -> Axes:
        axes = self.of(operation.operands[0])
        axis = int((operation.attribute("axis") or "0").split(" ")[0])
        divisor = math.gcd(
            *(d if c == 1 else 1 for d, c in zip(axes.divisibility, axes.contiguity, strict=True))
        )
        return Axes(
            _inserted(axes.contiguity, axis, 1),
            _inserted(axes.divisibility, axis, divisor),
            _inserted(axes.constancy, axis, 1),
        )

    def _broadcast(self, operation: Operation, shape: list[int]) -> Axes:
        axes = self.of(operation.operands[0])
        tensor = _TENSOR.search(operation.text)
        assert tensor is not None, f"a broadcast of no tensor: {operation.text}"
        before = [int(extent) for extent in tensor[1].split("x") if extent]
        grows = [old != new for old, new in zip(before, shape, strict=True)]
        return Axes(
            tuple(1 if grow else c for c, grow in zip(axes.contiguity, grows, strict=True)),
            axes.divisibility,
            tuple(
                extent if grow else c
                for c, grow, extent in zip(axes.constancy, grows, shape, strict=True)
            ),
        )

    def _add(self, operation: Operation) -> Axes:
        left, right = map(self.of, operation.operands[:2])
        if self._is_heap_distance(operation):
            return Axes((1,), (PAGE,), (1,))
        if len(left.contiguity) != len(right.contiguity):
            return left
        item = 1
        if operation.name == "tt.addptr":
            bits = re.search(r"!tt\.ptr<(?:b?f|i)(\d+)", operation.text)
            item = max(int(bits[1]) // 8, 1) if bits else 1
        contiguity = _gcds(left.contiguity, right.constancy)
        if operation.name != "arith.subi":
            other = _gcds(left.constancy, right.contiguity)
            contiguity = tuple(map(max, contiguity, other))
        scaled = tuple(min(d * item, ANY) for d in right.divisibility)
        return Axes(
            contiguity,
            _gcds(left.divisibility, scaled),
            _gcds(left.constancy, right.constancy),
        )

    def _is_heap_distance(self, operation: Operation) -> bool:
        """The difference of two 64-bit words loaded through one pointer."""
        if operation.name != "arith.subi" or not operation.text.endswith("i64"):
            return False
        made = [self.function.definitions.get(value) for value in operation.operands]
        loads = [one for one in made if one is not None and one.name == "tt.load"]
        if len(loads) < 2:
            return False
        tables = [self.function.bases(one.operands[0]) for one in loads]
        return bool(tables[0]) and tables[0] == tables[1]

    def _multiply(self, left: Axes, right: Axes) -> Axes:
        def factor(axes: Axes) -> tuple[int, ...]:
            pairs = zip(axes.divisibility, axes.contiguity, strict=True)
            return tuple(d if c == 1 else 1 for d, c in pairs)

        products = zip(factor(left), factor(right), strict=False)
        divisibility = tuple(min(a * b, ANY) for a, b in products)
        rank = len(divisibility)
        return Axes((1,) * rank, divisibility, _gcds(left.constancy, right.constancy))

    def _divide(self, left: Axes, right: Axes, divisor: str) -> Axes:
        rank = len(left.contiguity)
        ones = (1,) * rank
        definition = self.function.definitions.get(divisor)
        value = 0
        if definition is not None and definition.name == "arith.constant":
            value = abs(_constant_value(definition))
        if value and right.divisibility[0] == value:
            divided = tuple(max(d // right.divisibility[0], 1) for d in left.divisibility)
            return Axes(ones, divided, left.constancy)
        return Axes(ones, ones, _gcds(left.constancy, right.constancy))

    def _remainder(self, left: Axes, right: Axes) -> Axes:
        if len(left.contiguity) != len(right.contiguity):
            return Axes(*((1,) * len(left.contiguity),) * 3)
        divisibility = _gcds(left.divisibility, right.divisibility)
        return Axes(
            _gcds(left.contiguity, divisibility),
            divisibility,
            _gcds(left.constancy, right.constancy),
        )

    def _compare(self, operation: Operation, left: Axes, right: Axes) -> Axes:
        if len(left.contiguity) != len(right.contiguity):
            return Axes(*((1,) * len(left.contiguity),) * 3)
        # A run of neighbours lies on one side of a bound where both begin at its multiples; for
        # `x <= bound` its first element may lie apart, for `x == bound` any one.
        predicate = operation.text.removeprefix("arith.cmpi").split(",")[0].strip()
        runs = (1,) * len(left.contiguity)
        if predicate[1:] in ("gt", "le"):
            left, right = right, left
        if predicate not in ("eq", "ne"):
            divisibility = _gcds(left.divisibility, right.divisibility)
            runs = _gcds(_gcds(left.contiguity, right.constancy), divisibility)
        constancy = tuple(map(max, _gcds(left.constancy, right.constancy), runs))
        return Axes((1,) * len(runs), (1,) * len(runs), constancy)


def _shape(text: str) -> list[int]:
    """The extents of the operation's result: its text ends with the type."""
    matches = _TENSOR.findall(text)
    return [int(extent) for extent in matches[-1][0].split("x") if extent] if matches else []


def _constant_value(operation: Operation) -> int:
    match = re.match(r"arith\.constant (?:dense<)?(-?\d+)", operation.text)
    return int(match[1]) if match else 0


def _inserted(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis:])
