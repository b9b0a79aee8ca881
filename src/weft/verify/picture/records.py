"""What a picture is made of: pure data, which the renderers draw."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.place import Place
from weft.base.report import Finding

# Of an arrow of kind "value".
UNACQUIRED = "seen, but it orders nothing: it is relaxed, of too small a scope, or a packet"


@dataclass(frozen=True)
class Lane:
    """A party's column: `key` is its letter; its life goes from row `first` to row `last`."""

    key: str
    rank: int
    title: str
    stream: str
    first: int
    last: int

    def __str__(self) -> str:
        where = f", stream {self.stream}" if self.stream else ""
        return f"rank {self.rank}: {self.title}{where}"


@dataclass(frozen=True)
class Row:
    """A step of the party in column `lane`; `mark` is the kind of the event.

    `mark` is an event's kind, or "earlier" and "later" for the two accesses of a race. `steps` are
    all those that the row stands for.
    """

    lane: int
    steps: tuple[int, ...]
    mark: str
    text: str
    place: Place

    @property
    def step(self) -> int:
        return self.steps[-1]


@dataclass(frozen=True)
class Arrow:
    """From row `start` to row `end`: a signal and the wait that it satisfied.

    kinds  order    what came before the signal is known behind the wait
           value    the wait saw the signal and did not acquire it: it is relaxed, say
           missing  no signal at all, but one should be there
    """

    start: int
    end: int
    kind: str = "order"


@dataclass(frozen=True)
class Picture:
    """One finding, explained, or the end of a run; `shown` of `total` steps are drawn.

    `elsewhere` says in words where the parties without a column were at the end, `absent` what
    ordering would have had to be.
    """

    finding: Finding | None
    lanes: tuple[Lane, ...]
    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    elsewhere: tuple[str, ...] = ()
    absent: str = ""
    shown: int = 0
    total: int = 0
