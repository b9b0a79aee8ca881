"""Phrases that the C of all kernels has: where blocks lie, what is awaited, scratchpad buffers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from weft.manycore.nest import Choices
from weft.manycore.scratchpad import Map
from weft.manycore.signals import Ready
from weft.manycore.values import Value, View

# Buffers of sums and scores; others are of elements.
WIDTH = 100
FLOATS = ("sums", "scores", "softmax")


def memory(value: Value) -> str:
    return f"MEM_{value.name.upper()}"


def block(view: View, row: str, column: str) -> str:
    """Where a block of a view begins, in this rank's memory."""
    row, column = _plus(view.first_row, row), _plus(view.first, column)
    return f"mc_here(core, {memory(view.value)}, {row}, {column})"


def _plus(first: int, index: str) -> str:
    if not first:
        return index
    return str(first) if index == "0" else f"{first} + {index}"


def transfer(verb: str, choices: Choices) -> str:
    return f"mc_{verb}" if choices.coalesce else f"mc_{verb}_by_rows"


def begin(number: int, active: int) -> list[str]:
    return [f"    mc_begin(core, {number}, {active});"]


def awaits(signals: Sequence[Ready]) -> list[str]:
    if not signals:
        return []
    each = [f"        mc_await(core, {one.symbol} + source, {one.count});" for one in signals]
    return ["    for (int source = 0; source < core->ranks; source++) {", *each, "    }"]


def buffers(
    found: Map | None, slots_of: Iterable[str], names: Mapping[str, str]
) -> list[str]:  # fmt: skip
    """The scratchpad's buffers; those of `slots_of` by slot, be there one or two."""
    assert found is not None
    lines = []
    for one in found.buffers:
        name = names.get(one.name, one.name)
        places = [f"mc_scratch(core, {offset})" for offset in one.offsets]
        of = "float" if one.name in FLOATS or one.name.endswith("_row") else "mc_elem"
        if name in slots_of:
            lines.append(f"    {of} *const {name}[] = {{{', '.join(places)}}};")
        else:
            lines.append(f"    {of} *const {name} = {places[0]};")
    return lines


def number(value: float) -> str:
    """As a float of C."""
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"


def bracketed(size: str) -> str:
    """An expression as a factor."""
    return size if size.isdigit() else f"({size})"


def folded(line: str) -> list[str]:
    """A line of C, or of a comment, in lines as wide as a page."""
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= WIDTH:
        return [line]
    ahead = " * " if line.lstrip().startswith("/*") else "    "
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent + ahead, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
