"""Index arithmetic as integers: which tiles are affine and which masks are boxes.

Each rule looks at one operation and says what the result is if its operands are affine; None means
that the tile has to be computed. The tile itself is still there for whoever asks for it.

A rule's integers are mathematical, the machine's wrap at 32 bits. They agree as long as the values
fit, which is checked where a 32-bit index becomes an address, a 64-bit one, or a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Text = str | int


class Affine:
    """start + sum of index * step. `known` has the steps that the code generator knows.

    `get` writes what is needed into the generated code, once, and returns (start, steps) as
    integers or names of integers.
    """

    def __init__(
        self, known: tuple[int | None, ...], make: Callable[[], tuple[Text, tuple[Text, ...]]]
    ) -> None:
        self.known = known
        self.get = cache(make)


class Boxed:
    """A mask that holds from `first` to before `end` along each axis; None is all of an axis."""

    def __init__(self, make: Callable[[], tuple[tuple[Text, Text] | None, ...]]) -> None:
        self.get = cache(make)


def affine_of(code: Any, value: Any, rank: int) -> Affine | None:
    """`value` as an affine tile of `rank` axes; a scalar is one whose steps are all 0."""
    held = code.held[value]
    if held.affine is not None:
        return held.affine
    if held.phys == () and not code.vector and code.is_integer(value):
        return Affine((0,) * rank, lambda: (code.integer(value), (0,) * rank))
    return None


# ---------------------------------------------------------------------------------------------
# Text of integers, folded where it is known


def plus(a: Text, b: Text) -> Text:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0:
        return b
    return a if b == 0 else f"{a} + {b}"


def minus(a: Text, b: Text) -> Text:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return a if b == 0 else f"{a} - {b}" if a != 0 else f"-{b}"


def times(a: Text, b: Text) -> Text:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if 0 in (a, b):
        return 0
    return b if a == 1 else a if b == 1 else f"{a} * {b}"


# ---------------------------------------------------------------------------------------------
# Rules for tiles


def both(code: Any, op: Any, rule: Callable, itemsize: int | None = None) -> Affine | None:
    """a + b or a - b, by its rule for integers; b is an index of elements of `itemsize` bytes where
    a is a pointer."""
    rank = len(op.result.type.shape)
    sides = [affine_of(code, operand, rank) for operand in op.operands]
    if None in sides or not rank:
        return None
    a, b = sides
    pending, factor = code.pending(), itemsize or 1

    def make() -> tuple[Text, tuple[Text, ...]]:
        (start_a, steps_a), (start_b, steps_b) = a.get(), b.get()
        if itemsize is not None:
            guard(code, pending, op.operands[1], start_b, steps_b, op)
        start = pending.name(op.result, "at", rule(start_a, times(start_b, factor)))
        steps = tuple(
            pending.name(op.result, f"step{axis}", rule(x, times(y, factor)))
            for axis, (x, y) in enumerate(zip(steps_a, steps_b, strict=True))
        )
        return start, steps

    known = tuple(
        rule(x, y * factor) if x is not None and y is not None else None
        for x, y in zip(a.known, b.known, strict=True)
    )  # 0 + unknown is unknown
    return Affine(known, make)


def multiplied(code: Any, op: Any) -> Affine | None:
    """An affine tile times a scalar."""
    rank = len(op.result.type.shape)
    sides = [affine_of(code, operand, rank) for operand in op.operands]
    if None in sides or not rank:
        return None
    a, b = sides
    if code.phys(op.operands[0]) == ():
        a, b = b, a
    elif code.phys(op.operands[1]) != ():
        return None
    pending = code.pending()

    def make() -> tuple[Text, tuple[Text, ...]]:
        start, steps = a.get()
        factor = b.get()[0]
        return _scaled(pending, op.result, start, steps, factor)

    scalar = code.known(op.operands[0 if b is sides[0] else 1])
    factor = int(scalar) if scalar is not None else None
    known = tuple(
        0 if step == 0 else step * factor if step is not None and factor is not None else None
        for step in a.known
    )
    return Affine(known, make)


def _scaled(pending: Any, value: Any, start: Text, steps: Sequence[Text], factor: Text):
    def grouped(text: Text) -> Text:
        return f"({text})" if isinstance(text, str) and " " in text else text

    at = pending.name(value, "at", times(grouped(start), factor))
    return at, tuple(
        pending.name(value, f"step{axis}", times(step, factor)) for axis, step in enumerate(steps)
    )


def widened(code: Any, op: Any) -> Affine | None:
    """A 32-bit index as a 64-bit one: the same integers, if they have not wrapped."""
    source = op.operands[0]
    affine = code.held[source].affine
    if affine is None or source.type.element not in ("i32", "i64"):
        return None
    pending = code.pending()

    def make() -> tuple[Text, tuple[Text, ...]]:
        start, steps = affine.get()
        guard(code, pending, source, start, steps, op)
        return start, steps

    return Affine(affine.known, make)


def moved(code: Any, op: Any, axes: Sequence[int | None]) -> Affine | None:
    """The tile whose axis i is the operand's axis axes[i]; None is a new one of extent 1."""
    affine = code.held[op.operands[0]].affine
    if affine is None:
        return None

    def pick(steps: tuple) -> tuple:
        return tuple(0 if axis is None else steps[axis] for axis in axes)

    def make() -> tuple[Text, tuple[Text, ...]]:
        start, steps = affine.get()
        return start, pick(steps)

    return Affine(pick(affine.known), make)


def guard(code: Any, pending: Any, value: Any, start: Text, steps: Sequence[Text], op: Any):
    """Check, in the generated code, that a 32-bit tile has not wrapped."""
    if code.phys(value) == () or value.type.element != "i32":
        return
    extents = value.type.shape
    if all(isinstance(step, int) for step in steps):
        spans = [step * (extent - 1) for step, extent in zip(steps, extents, strict=True)]
        low, high = sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)
        if isinstance(start, int):
            if -(1 << 31) <= start + low and start + high < 1 << 31:
                return
            test = "True"
        else:
            test = f"{start} > {(1 << 31) - 1 - high} or {start} < {-(1 << 31) - low}"
    else:
        axes = "".join(f"({step}, {extent}), " for step, extent in zip(steps, extents, strict=True))
        test = f"not fits_i32({start}, ({axes}))"
    pending.add(f"if {test}:")
    pending.add(f"    index_overflow(LOCATIONS[{code.loc(op)}])")


# ---------------------------------------------------------------------------------------------
# Rules for masks

SWAPPED = {"slt": "sgt", "sle": "sge", "sgt": "slt", "sge": "sle"}


def compared(code: Any, op: Any) -> Boxed | None:
    """An index that counts by one along a single axis, against a scalar."""
    word = op.words[0]
    index, limit = op.operands
    if code.phys(index) == ():
        index, limit, word = limit, index, SWAPPED.get(word, "")
    affine = code.held[index].affine
    if affine is None or code.phys(limit) != () or word not in SWAPPED or code.vector:
        return None
    moving = [axis for axis, step in enumerate(affine.known) if step != 0]
    if len(moving) != 1 or affine.known[moving[0]] != 1:
        return None
    axis, shape = moving[0], index.type.shape
    extent = shape[axis]
    pending = code.pending()

    def make() -> tuple[tuple[Text, Text] | None, ...]:
        start, steps = affine.get()
        guard(code, pending, index, start, steps, op)
        edge = minus(code.integer(limit), start)
        if word in ("sle", "sgt"):
            edge = plus(edge, 1)
        edge = pending.between(
            op.result, "end" if word in ("slt", "sle") else "first", edge, extent
        )
        pair = (0, edge) if word in ("slt", "sle") else (edge, extent)
        return tuple(pair if i == axis else None for i in range(len(shape)))

    return Boxed(make)


def both_masks(code: Any, op: Any) -> Boxed | None:
    """The intersection of two boxes."""
    a, b = (code.held[operand].box for operand in op.operands)
    if a is None or b is None:
        return None
    pending = code.pending()

    def make() -> tuple[tuple[Text, Text] | None, ...]:
        pairs = []
        for axis, (x, y) in enumerate(zip(a.get(), b.get(), strict=True)):
            if x is None or y is None:
                pairs.append(y if x is None else x)
                continue
            first = pending.larger(op.result, f"first{axis}", x[0], y[0])
            end = pending.smaller(op.result, f"end{axis}", x[1], y[1])
            pairs.append((first, pending.larger(op.result, f"behind{axis}", first, end)))
        return tuple(pairs)

    return Boxed(make)


def moved_mask(code: Any, op: Any, axes: Sequence[int | None]) -> Boxed | None:
    box = code.held[op.operands[0]].box
    if box is None:
        return None
    return Boxed(lambda: tuple(None if axis is None else box.get()[axis] for axis in axes))
