"""Lines of generated source, as the formatter would lay them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

WIDTH = 100


def fitting(lines: Iterable[str], width: int = WIDTH) -> Iterator[str]:
    """Lines that are too long are broken at their outermost call, as the formatter does."""
    for line in lines:
        code, mark, comment = line.partition("  #")
        if len(line) <= width or "(" not in code:
            yield line
            continue
        margin = " " * (len(line) - len(line.lstrip()))
        begin, _, rest = code.partition("(")
        yield f"{begin}("
        if len(margin) + 4 + len(rest) - 1 <= width:
            yield f"{margin}    {rest[:-1]}"
        else:
            yield from (f"{margin}    {one}," for one in _items(rest[:-1]))
        yield f"{margin}){mark}{comment}"


def _items(arguments: str) -> list[str]:
    """The arguments of a call, one by one."""
    found, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found]


def wrapped(row: str) -> list[str]:
    """One row of a call's arguments, which stands 8 columns in, as several where it is too long."""
    return wrap(row, WIDTH - 8, break_long_words=False, subsequent_indent="    ")


def call(begin: str, items: Sequence[str], end: str, *, skip: bool = False) -> list[str]:
    """A call or a definition; over several lines where it does not fit in one."""
    line = f"{begin}{', '.join(items)}{end}"
    if len(line) <= WIDTH:
        return [line]
    # An item is not broken within: its blanks are put back behind wrap.
    lines = wrap(", ".join(item.replace(" ", "\0") for item in items) + ",", WIDTH - 8)
    mark = "  # fmt: skip" if skip else ""
    return [begin, *(f"    {one}".replace("\0", " ") for one in lines), f"{end}{mark}"]
