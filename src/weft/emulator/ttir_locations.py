"""Where an operation comes from: `loc(...)` in TTIR text, as a chain of source lines."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from functools import cache

from weft.base.place import Frame, Place

_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_NAMED = re.compile(r'^"(?:[^"\\]|\\.)*"(?:\((.*)\))?$', re.DOTALL)
ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$")


class Locations:
    """Resolves `loc(...)` texts to places, each alias once."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.places: dict[str, Place] = {}

    def place(self, text: str) -> Place:
        if text not in self.places:
            self.places[text] = Place(tuple(self._frames(text.strip())))
        return self.places[text]

    def _frames(self, text: str) -> list[Frame]:
        """The chain of `text`, outermost call first."""
        if text.startswith("#loc"):
            return self._frames(self.aliases.get(text, "unknown"))
        if match := _FILE.match(text):
            file, line = match.group(1), int(match.group(2))
            return [Frame(file, line, enclosing_function(file, line))]
        if text.startswith("callsite("):
            callee, caller = _split(text[9:-1], " at ")
            callee_frames = self._frames(callee)
            # A callee of unknown place says nothing: the call is the best there is.
            return self._frames(caller) + callee_frames
        if text.startswith("fused"):
            inner = text[text.index("[") + 1 : text.rindex("]")]
            for part in commas(inner):
                if frames := self._frames(part):
                    return frames
            return []
        if match := _NAMED.match(text):
            return self._frames(match.group(1).strip()) if match.group(1) else []
        return []


def _split(text: str, separator: str) -> tuple[str, str]:
    """Cut `text` at the first `separator` outside parentheses."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([<") - (character in ")]>")
        if depth == 0 and text.startswith(separator, position):
            return text[:position].strip(), text[position + len(separator) :].strip()
    return text, "unknown"


def commas(text: str) -> Iterator[str]:
    while text:
        first, rest = _split(text, ",")
        yield first
        text = "" if rest == "unknown" else rest


_DEF = re.compile(r"^(\s*)(?:async\s+)?def\s+(\w+)")


@cache
def enclosing_function(file: str, line: int) -> str:
    """The name of the `def` around `line`, read from the source; empty where it is not there."""
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return ""
    indent = 1 << 30
    for text in reversed(lines[:line]):
        if not text.strip():
            continue
        here = len(text) - len(text.lstrip())
        match = _DEF.match(text)
        if match and (here < indent or here == 0):
            return match.group(2)
        # Decorators and wrapped lines may stand anywhere; only a shallower statement counts.
        indent = min(indent, max(here, 1))
    return ""


def cut_location(text: str) -> tuple[str, str]:
    """`text` without its trailing `loc(...)`, and what stands in it."""
    text = text.rstrip()
    position = text.rfind("loc(")
    while position > 0 and text[position - 1] not in " ":
        position = text.rfind("loc(", 0, position)
    if position < 0 or not text.endswith(")"):
        return text, ""
    return text[:position].rstrip(), text[position + 4 : -1]
