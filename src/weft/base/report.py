"""What a checker hands back: findings with the two sides of each, and a report of them all.

The emulator, the schedule explorer and the post-compile check all speak in these records; their
JSON is what `weft verify --json` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.base.counts import counted
from weft.base.place import UNKNOWN, Frame, Place

RACE_KINDS = ("race",)
# So many findings of one cause are listed by their lines.
ALSO_SHOWN = 6
DEADLOCK_KINDS = ("deadlock", "unsatisfiable wait")


@dataclass(frozen=True)
class Side:
    """One party of a finding: the rank and program, what it did, and where in the user's source.

    A field that is not known, or that has no meaning for the finding, is None. `program` is the
    program id as (x, y, z), `index` the element of `tensor`; `note` says in words what this side
    did ("stores without order", "waits for 3, sees 1") and is not part of the JSON; `place` is
    the whole call chain, of which `file` and `line` are the user's outermost frame; `step` is when
    it was, where the run was observed.
    """

    rank: int | None = None
    kernel: str | None = None
    program: tuple[int, ...] | None = None
    file: str | None = None
    line: int | None = None
    tensor: str | None = None
    index: int | tuple[int, ...] | None = None
    note: str = ""
    place: Place = UNKNOWN
    step: int | None = field(default=None, compare=False)

    @classmethod
    def at(cls, place: Place, **fields: object) -> Side:
        """A side at `place`; its file and line are those of the outermost frame."""
        frame = place.outermost
        if frame is not None:
            fields = {"file": frame.file, "line": frame.line, **fields}
        return cls(place=place, **fields)  # type: ignore[arg-type]

    def is_told_in(self, message: str) -> bool:
        """Does a message that follows call chains have this side's line, with its source?"""
        frame = self.place.outermost
        return frame is not None and f"at {frame}\n" in message

    def to_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "kernel": self.kernel,
            "program": _plain(self.program),
            "file": self.file,
            "line": self.line,
            "tensor": self.tensor,
            "index": _plain(self.index),
        }

    def __str__(self) -> str:
        who = [] if self.rank is None else [f"rank {self.rank}"]
        if self.kernel:
            who.append(f"kernel {self.kernel}")
        if self.program is not None:
            who.append(f"program {_tuple_text(self.program)}")
        text = ", ".join(who) or "somebody"
        if self.note:
            text += f": {self.note}"
        if self.tensor is not None:
            text += f" {self.tensor}"
            if self.index is not None:
                text += f"[{_tuple_text(self.index)}]"
        where = self.place
        if not where.frames and self.file is not None:
            where = Place((Frame(self.file, self.line or 0),))
        if where.frames:
            text += f"\n    at {where}"
        return text


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: `kind` is a short stable word ("race", "deadlock", "lost wait").

    `message` says what is wrong with its values, and `remedy` what to write instead. Findings with
    one `cause`, a signal that is too weak for instance, are one defect, whatever met because of it.
    `follows`: something had failed before, of which this may be a consequence.
    """

    kind: str
    message: str
    first: Side
    second: Side | None = None
    remedy: str = ""
    cause: str = ""
    follows: bool = False

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    def key(self) -> tuple[object, ...]:
        """Equal for two sightings of one defect: the kind, and its cause or else both sides' lines.

        Which of the two came first, and on which rank's part of a tensor they met, is chance.
        """
        return (self.kind, self.cause) if self.cause else self.lines()

    def lines(self) -> tuple[object, ...]:
        """The kind, and the source lines of both sides."""
        sides = [
            (str(side.file), side.line or 0, str(side.tensor).split("@rank")[0])
            for side in self.sides
        ]
        return (self.kind, *sorted(sides))

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "message": self.message,
            "first": self.first.to_json(),
            "second": None if self.second is None else self.second.to_json(),
            "remedy": self.remedy,
        }

    def briefly(self) -> str:
        """The finding in a line: its kind, the rank, what it did, and where."""
        return f"{self.kind}: {_where(self.first)}"

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}"]
        # A table of waits has said it already, line and all.
        lines += [f"  {side}" for side in self.sides if not side.is_told_in(self.message)]
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


@dataclass
class Report:
    """The verdict over one operator or script.

    `schedules` counts the schedules that ran; `complete` says that no other one could show more,
    else `bound` names what ended the search: never both. `races` and `deadlocks` hold findings of
    those kinds, `others` everything else. `arrivals` are pairs of additions of floats to one
    element in order of arrival: no fault where results need not be the same every time. `launches`
    counts those of kernels in all these runs: without one, little was looked at.
    """

    op: str
    ranks: int
    schedules: int = 1
    complete: bool = False
    bound: str = ""
    races: list[Finding] = field(default_factory=list)
    deadlocks: list[Finding] = field(default_factory=list)
    others: list[Finding] = field(default_factory=list)
    arrivals: list[tuple[Side, Side]] = field(default_factory=list)
    launches: int = 0
    # Of findings with a cause, by key: what else came of it, in a line each.
    also: dict[tuple[object, ...], dict[tuple[object, ...], str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not (self.races or self.deadlocks or self.others)

    @property
    def findings(self) -> list[Finding]:
        """All, in the order in which they are printed: an access out of bounds lies in another
        tensor, so races there may only follow from it."""
        found = [*self.races, *self.deadlocks, *self.others]
        return sorted(found, key=lambda one: one.kind != "out of bounds")

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def add(self, finding: Finding) -> bool:
        """File `finding` under its kind, unless its like is there already; says if it was new."""
        if finding.kind in RACE_KINDS:
            place = self.races
        elif finding.kind in DEADLOCK_KINDS:
            place = self.deadlocks
        else:
            place = self.others
        known = next((one for one in place if one.key() == finding.key()), None)
        if known is None:
            place.append(finding)
            return True
        if finding.lines() != known.lines():
            self.also.setdefault(finding.key(), {})[finding.lines()] = _where(finding.first)
        return False

    def merge(self, other: Report) -> None:
        """Take over another run's findings and schedules; complete only where both say so."""
        for finding in other.findings:
            self.add(finding)
            for lines, where in other.also.get(finding.key(), {}).items():
                self.also.setdefault(finding.key(), {})[lines] = where
        self.schedules += other.schedules
        self.launches += other.launches
        self.complete = self.complete and other.complete
        self.bound = self.bound or other.bound

    def to_json(self) -> dict[str, object]:
        """What `weft verify --json` prints; `others` is there only where it is not empty."""
        values: dict[str, object] = {
            "op": self.op,
            "ranks": self.ranks,
            "schedules": self.schedules,
            "complete": self.complete,
            "races": [self._json_of(finding) for finding in self.races],
            "deadlocks": [self._json_of(finding) for finding in self.deadlocks],
        }
        if self.others:
            values["others"] = [self._json_of(finding) for finding in self.others]
        values["ok"] = self.ok
        return values

    def _json_of(self, finding: Finding) -> dict[str, object]:
        values = finding.to_json()
        if also := self.also.get(finding.key()):
            values["also"] = list(also.values())
        return values

    def _text_of(self, finding: Finding) -> str:
        also = list(self.also.get(finding.key(), {}).values())
        if not also:
            return str(finding)
        shown = "".join(f"\n    {where}" for where in also[:ALSO_SHOWN])
        more = f"\n    and {len(also) - ALSO_SHOWN} more" if len(also) > ALSO_SHOWN else ""
        return f"{finding}\n  for the same reason:{shown}{more}"

    def __str__(self) -> str:
        covered = counted(self.schedules, "schedule")
        if self.complete:
            covered += ", complete: no other could show more"
        else:
            covered += ", not all" + (f": {self.bound}" if self.bound else "")
        head = f"{self.op} on {counted(self.ranks, 'rank')} ({covered}): "
        if self.ok:
            return head + "nothing found"
        counts = [
            counted(len(found), name)
            for name, found in (("race", self.races), ("deadlock", self.deadlocks))
            if found
        ]
        if self.others:
            kinds = ", ".join(dict.fromkeys(one.kind for one in self.others))
            name = "other finding" if counts else "finding"
            counts.append(f"{counted(len(self.others), name)} ({kinds})")
        causes = [one for one in self.findings if not one.follows] or self.findings
        rest = [one for one in self.findings if one not in causes]
        parts = [head + ", ".join(counts), *map(self._text_of, causes)]
        if rest:
            message = "".join(f"\n  {one.briefly()}" for one in rest)
            parts.append(f"after that, and maybe because of it:{message}")
        return "\n\n".join(parts)


def _where(side: Side) -> str:
    """What a side did, and at which line."""
    tensor = "" if side.tensor is None else f" {side.tensor.split('@rank')[0]}"
    who = "" if side.rank is None else f"rank {side.rank} "
    place = f" at {side.file}:{side.line}" if side.file else ""
    return f"{who}{side.note}{tensor}{place}"


def _tuple_text(value: int | Sequence[int]) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _plain(value: object) -> object:
    """Numbers of any library as the numbers that JSON knows."""
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return int(value)  # type: ignore[call-overload]
