"""Where an operation comes from: `loc(...)` in TTIR text, as a chain of source lines."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from functools import cache

from weft.base.place import Frame, Place
from weft.ir.ttir import Chain

_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_NAMED = re.compile(r'^"(?:[^"\\]|\\.)*"(?:\((.*)\))?$', re.DOTALL)
ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$")


class Locations:
    """Resolves `loc(...)` texts to places, each alias once."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.chains: dict[str, Chain] = {}
        self.places: dict[Chain, Place] = {}

    def place(self, text: str) -> Place:
        """The chain of calls, the outermost first, with the functions' names."""
        chain = self.chain(text)
        if chain not in self.places:
            self.places[chain] = Place(tuple(
                Frame(file, line, enclosing_function(file, line)) for file, line, _ in chain[::-1]
            ))  # fmt: skip
        return self.places[chain]

    def chain(self, text: str) -> Chain:
        """The same with columns, the innermost call first; empty where nothing is known."""
        text = text.strip()
        if text not in self.chains:
            self.chains[text] = ()  # a malformed table that refers to itself ends here
            self.chains[text] = self._chain(text)
        return self.chains[text]

    def _chain(self, text: str) -> Chain:
        if text.startswith("#loc"):
            return self.chain(self.aliases.get(text, "unknown"))
        if match := _FILE.match(text):
            return ((match[1], int(match[2]), int(match[3])),)
        if text.startswith("callsite("):
            callee, caller = _split(text[9:-1], " at ")
            # A callee of unknown place says nothing: the call is the best there is.
            return self.chain(callee) + self.chain(caller)
        if text.startswith("fused"):
            inner = text[text.index("[") + 1 : text.rindex("]")]
            parts = [self.chain(part) for part in commas(inner)]
            return next((part for part in parts if part and part[0][1]), ())
        if match := _NAMED.match(text):
            return self.chain(match[1]) if match[1] else ()
        return ()


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
