"""Where a program can be changed, and what is changed there: the words of mutants."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from weft.base.place import Place

# What is done to a site. A note of equivalence may also name a family by its first word:
# `relax` is both relax-acquire and relax-release, `value` is value+1 and value-1.
KINDS = {
    "drop": "left out",
    "relax-acquire": "no longer acquires",
    "relax-release": "no longer releases",
    "narrow": "covers the device instead of the system, or the block instead of the device",
    "value+1": "sets, adds or waits for one more",
    "value-1": "sets, adds or waits for one less",
    "parity": "waits for the other phase of an mbarrier",
    "count+1": "waits for one word more",
    "count-1": "waits for one word less",
    "peer+1": "goes to the next rank",
    "swap": "comes before what it follows",
    "double": "done twice, where it is counted",
    "incomplete": "does not complete the asynchronous stores before it",
}

HOST = "host"
LAUNCH = "launch of "


class Line(NamedTuple):
    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


class Site(NamedTuple):
    """One primitive of a kernel, or one operation of the host.

    `kernel` is its name, or HOST; `lines` the chain of calls, the outermost first; `ordinal`
    counts those with the same primitive and chain in one kernel, from 0.
    """

    kernel: str
    primitive: str
    lines: tuple[Line, ...]
    ordinal: int = 0

    def __str__(self) -> str:
        chain = " > ".join(map(str, self.lines)) or "an unknown line"
        number = f" #{self.ordinal + 1}" if self.ordinal else ""
        return f"{self.primitive} in {self.kernel} at {chain}{number}"


class Mutant(NamedTuple):
    """A site and what is done to it, a word of KINDS."""

    site: Site
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.site}"


def lines_of(place: Place) -> tuple[Line, ...]:
    return tuple(Line(frame.file, frame.line) for frame in place.frames)
