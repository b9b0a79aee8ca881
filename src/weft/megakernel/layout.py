"""Lines of generated source, as the formatter would lay them out."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

WIDTH = 100


def call(begin: str, items: Sequence[str], end: str, *, skip: bool = False) -> list[str]:
    """A call or a definition; over several lines where it does not fit in one."""
    line = f"{begin}{', '.join(items)}{end}"
    if len(line) <= WIDTH:
        return [line]
    # An item is not broken within: its blanks are put back behind wrap.
    lines = wrap(", ".join(item.replace(" ", "\0") for item in items) + ",", WIDTH - 8)
    mark = "  # fmt: skip" if skip else ""
    return [begin, *(f"    {one}".replace("\0", " ") for one in lines), f"{end}{mark}"]
