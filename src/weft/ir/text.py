"""The text of the three levels: one statement a line, in Python's grammar.

    g: bfloat16[m, 64] @ Replicate() = all_gather(x, dim=0)  # mlp.py:12 in mlp

A statement is a frozen dataclass. Its field `name`, where it has one, stands on the left, `type`
behind a colon, `place` in the comment; the others are arguments, those that have their default
left out. A string that is an identifier is written bare. Nothing is lost: tests read it back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import keyword
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from weft.base.place import UNKNOWN, Place

# Of a statement these stand beside the arguments; `kind` is its word.
_BESIDE = ("name", "type", "kind", "place")


@dataclass(frozen=True)
class Header:
    """The first line of a program, the same at every level."""

    WORD: ClassVar[str] = "program"

    title: str
    mesh: str = ""
    stage: str = ""
    results: tuple[str, ...] = ()
    place: Place = UNKNOWN


def show(statements: Iterable[Any], *, places: bool = True) -> str:
    """The statements as text; without places for a shorter page."""
    return "".join(f"{_statement(one, places)}\n" for one in statements)


def digest(statements: Iterable[Any]) -> str:
    """Eight digits that differ where statements do, wherever these were written."""
    shown = show(statements, places=False)
    return hashlib.blake2b(shown.encode(), digest_size=4).hexdigest()


def word(kind: type) -> str:
    """How a dataclass is spelled as a statement."""
    return getattr(kind, "WORD", kind.__name__.lower())


def value(item: Any) -> str:
    """One argument as text."""
    if isinstance(item, str):
        # Python reads a name in its normal form.
        is_name = item.isidentifier() and unicodedata.normalize("NFKC", item) == item
        return item if is_name and not keyword.iskeyword(item) else repr(item)
    if isinstance(item, tuple):
        return f"({', '.join(map(value, item))}{',' * (len(item) == 1)})"
    if hasattr(item, "as_text"):
        return item.as_text()
    if dataclasses.is_dataclass(item):
        return f"{type(item).__name__}({_arguments(item)})"
    return repr(item)


def _statement(one: Any, places: bool) -> str:
    # A task is spelled by its kind: there are many, of one record.
    spelled = getattr(one, "kind", "") or word(type(one))
    text = f"{spelled}({_arguments(one)})"
    if getattr(one, "name", ""):
        kind = getattr(one, "type", None)
        text = f"{one.name}{': ' + value(kind) if kind is not None else ''} = {text}"
    place = getattr(one, "place", UNKNOWN)
    return f"{text}  # {_place(place)}" if places and place.frames else text


def _arguments(record: Any) -> str:
    """What has no default by position, then the others by name."""
    parts = []
    for field in _argument_fields(type(record)):
        item = getattr(record, field.name)
        if field.metadata.get("spread"):
            parts += map(value, item)
        elif field.default is dataclasses.MISSING:
            parts.append(value(item))
        elif item != field.default:
            parts.append(f"{field.name}={value(item)}")
    return ", ".join(parts)


def _argument_fields(record: type) -> list[dataclasses.Field]:
    fields = dataclasses.fields(record)
    is_statement = any(field.name == "place" for field in fields)
    return [field for field in fields if not (is_statement and field.name in _BESIDE)]


def _place(place: Place) -> str:
    """Frames, the user's outermost first; what a name may hold beside letters is quoted."""
    frames = []
    for frame in place.frames:
        where = f"{quote(frame.file, safe='/:._-')}:{frame.line}"
        inside = f" in {quote(frame.function, safe='<>._')}" if frame.function else ""
        frames.append(where + inside)
    return " via ".join(frames)


def untaken(name: str, taken: Collection[str]) -> str:
    """A name that nothing else has: this one, or with as many underscores as that takes."""
    while name in taken:
        name += "_"
    return name
