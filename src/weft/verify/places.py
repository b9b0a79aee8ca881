"""Source places inside compiled code: parsed from each stage, comparable between stages.

A `Loc` is a chain of (file, line, column), the innermost callee first, as compilers print it.
Triton keeps these through TTIR, TTGIR and LLVM down to the assembly's `.loc` lines, which makes
them the thread by which one operation is followed from stage to stage.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from weft.base.place import Frame, Place

Loc = tuple[tuple[str, int, int], ...]
Key = tuple[tuple[str, int, int], ...]

_Spot = tuple[str, str, str]  # file number, line, column

NOWHERE: Loc = ()

_ASM_LOC = re.compile(r"^\.loc\s+(\d+) (\d+) (\d+)(?:.*?inlined_at (\d+) (\d+) (\d+))?")
_ASM_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.MULTILINE)
_ASM_PART = re.compile(r"([^\s\[\]:]+):(\d+)(?::(\d+))?")  # column 0 is left out


def key_of(loc: Loc) -> Key:
    """`loc` as every stage knows it: files without their folders."""
    return tuple((file.rsplit("/", 1)[-1], line, column) for file, line, column in loc)


def is_known(loc: Loc) -> bool:
    return bool(loc) and loc[0][1] > 0


def place_of(loc: Loc) -> Place:
    """`loc` as a call chain, the user's outermost frame first."""
    return Place(tuple(Frame(file, line) for file, line, _ in reversed(loc)))


class AssemblyLines:
    """The `.loc` lines of an assembly file as chains of places.

    Some LLVMs print the chain in a comment, `a.py:25:34 @[ b.py:69:20 @[ c.py:3 ] ]`. Others write
    `inlined_at` with the place of the caller, and say once, in a line of its own, where that one
    was inlined; a helper inlined at two places then has two chains, and no line says which one
    is meant: `read` gives those of the chains `known` that the lines allow, first the one that was
    told last; of a place that none of these has, the chain told last. Lines are read in order.
    """

    def __init__(
        self, text: str, files: Mapping[str, str], known: Collection[Key] = frozenset()
    ) -> None:
        self.files, self._known = files, known
        # A function that calls itself is its own parent: beginnings of known chains end the walk.
        self._begins = {key[:end] for key in known for end in range(1, len(key) + 1)}
        self.table = {
            number: (name or path).rsplit("/", 1)[-1]
            for number, path, name in _ASM_FILE.findall(text)
        }
        self.parents: dict[_Spot, set[_Spot | None]] = {}
        for line in text.splitlines():
            if match := _ASM_LOC.match(line.strip()):
                self.parents.setdefault(_spot(match, 1), set()).add(_spot(match, 4))
        self._last: dict[_Spot, _Spot | None] = {}

    def read(self, line: str) -> tuple[Loc, ...]:
        """The chains that may hold for the instructions after this `.loc` line."""
        match = _ASM_LOC.match(line.strip())
        if match is None:
            return (NOWHERE,)
        own, parent = _spot(match, 1), _spot(match, 4)
        self._last[own] = parent
        if parent is not None:
            return tuple(self._chains((), own, (parent,))) or (self._told_last(own),)
        comment = _ASM_PART.findall(line.partition("//")[2])
        if comment:
            return (
                tuple(
                    (self.files.get(file, file), int(number), int(column or 0))
                    for file, number, column in comment
                ),
            )
        return (self._place(own),)

    def _chains(self, inner: Loc, spot: _Spot, parents: Iterable[_Spot | None]) -> Iterator[Loc]:
        """The known chains that begin with `inner`, which was inlined at `spot`."""
        loc = inner + self._place(spot)
        if (key := key_of(loc)) not in self._begins:
            return
        for parent in parents:
            if parent is not None:
                last = self._last.get(parent)
                above = self.parents.get(parent, {None})
                in_order = sorted(above, key=lambda one: (one != last, str(one)))
                yield from self._chains(loc, parent, in_order)
            elif key in self._known:
                yield loc

    def _told_last(self, spot: _Spot | None) -> Loc:
        loc, seen = NOWHERE, set()
        while spot is not None and spot not in seen:
            seen.add(spot)
            loc += self._place(spot)
            spot = self._last.get(spot)
        return loc

    def _place(self, spot: _Spot) -> Loc:
        file = self.table.get(spot[0], spot[0])
        return ((self.files.get(file, file), int(spot[1]), int(spot[2])),)


def _spot(match: re.Match, first: int) -> _Spot:
    return match[first] and (match[first], match[first + 1], match[first + 2])
