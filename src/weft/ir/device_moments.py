"""A plan and the order of what it does: what a step accesses and announces, what is before what.

A step begins and ends; between the two it knows of what it awaits, and tells what it announces. By
these moments (`order.py`) rules and passes ask whether one access is over before another begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from weft.base.place import UNKNOWN, Place
from weft.ir.choice import Choice
from weft.ir.device_statements import (
    OWN_ROWS,
    After,
    Call,
    Channel,
    Copy,
    Launch,
    Notify,
    Statement,
    Step,
    Wait,
)
from weft.ir.order import Moment, Order


class Access(NamedTuple):
    """What a step does with a buffer; `far` says that it is also another rank's.

    `rows`: of the rank in whose memory they lie only its own, only others', or all.
    """

    buffer: str
    writes: bool
    far: bool = False
    rows: str = "all"

    def meets(self, other: Access) -> bool:
        """Is it of the same bytes?"""
        apart = {self.rows, other.rows} == {"own", "others"}
        return self.buffer == other.buffer and not apart


def accesses(step: Step) -> list[Access]:
    """The buffers that a step reads and writes."""
    if isinstance(step, Copy):
        is_pull = step.side == "pull"
        if step.side == "owner":
            return [Access(step.source, False), Access(step.target, True, True)]
        return [Access(step.source, False, is_pull, "own"),
                Access(step.target, True, not is_pull, "others")]  # fmt: skip
    if isinstance(step, Call | Launch):
        pushes = [Access(name, True, True) for name in getattr(step, "pushes", ())]
        reads = [Access(name, False) for name in step.reads]
        kinds = {do.kind for do in step.body} if isinstance(step, Launch) else set()
        rows = "own" if kinds and kinds <= set(OWN_ROWS) else "all"
        return [*reads, *[Access(name, True, rows=rows) for name in step.writes], *pushes]
    return []


def announced(step: Step) -> tuple[str, ...]:
    """The channels that a step announces."""
    if isinstance(step, Copy):
        return (step.announces,)
    if isinstance(step, Launch):
        return step.announces
    return (step.channel,) if isinstance(step, Notify) else ()


def awaited(step: Step) -> tuple[str, ...]:
    """The channels that a step waits for."""
    if isinstance(step, Launch):
        return step.awaits
    if isinstance(step, Copy):
        return (step.awaits,) if step.awaits else ()
    return (step.channel,) if isinstance(step, Wait) else ()


class Moments:
    """The order of a plan's moments, and which of them an access lies between."""

    def __init__(self, channels: Sequence[Channel], steps: Sequence[Step]) -> None:
        self.buffers_of = {one.name: {one.buffer, *one.along} for one in channels}
        self.by_packet = {one.name for one in channels if one.by == "packet"}
        self.tokens = {one.name for one in channels if one.to == "engine"}
        self.order = Order()
        self.steps = steps
        self.end = Moment(len(self.steps) + 1, "begin")  # what the caller does next
        add, last = self.order.add, {}
        caller = Moment(0, "end")
        for i, step in enumerate(self.steps, 1):
            begin, end = Moment(i, "begin"), Moment(i, "end")
            add(begin, end)
            # The caller's work lies on the main stream; another begins when a step orders it.
            before = last.get(step.stream, caller if step.stream == "main" else None)
            if before is not None:
                add(before, begin)
            if isinstance(step, After):
                add(last.get(step.other, caller), begin)
            last[step.stream] = end
            for name in announced(step):
                if isinstance(step, Copy) and step.side == "pull":
                    # It says of all that it moves when it is over.
                    add(end, Moment(i, "announced", name))
                    continue
                # A put says so where it has written alone: of what it reads here nobody hears, but
                # for who comes behind it on a stream.
                add(begin, Moment(i, "announced", name))
                add(Moment(i, "announced", name), end)
            for name in awaited(step):
                add(begin, Moment(i, "arrived", name))
                add(Moment(i, "arrived", name), end)
                for sent in announced(step) if isinstance(step, Copy) else ():
                    add(Moment(i, "arrived", name), Moment(i, "announced", sent))
        add(last.get("main", caller), self.end)
        self._add_channels()
        self.order.close()

    def _add_channels(self) -> None:
        """But for packets: they say of themselves that they have come, and order nothing else."""
        takers: dict[str, list[int]] = {}
        for j, taker in enumerate(self.steps, 1):
            for name in awaited(taker):
                if name not in self.by_packet:
                    takers.setdefault(name, []).append(j)
        for i, giver in enumerate(self.steps, 1):
            # What a rank fetches it tells itself, and tokens are for its own engine.
            is_pull = isinstance(giver, Copy) and giver.side == "pull"
            for name in announced(giver):
                is_far = not is_pull and name not in self.tokens
                for j in takers.get(name, ()):
                    sent, arrived = Moment(i, "announced", name), Moment(j, "arrived", name)
                    self.order.add(sent, arrived, far=is_far)

    def done(self, i: int, access: Access) -> list[Moment]:
        """When step i is done with a buffer: at its end, or, written, when it has announced it."""
        sent = [] if not access.writes else [*self._of(i, "announced", announced, access.buffer)]
        return [Moment(i, "end"), *sent]

    def begun(self, i: int, access: Access) -> list[Moment]:
        """What is before one of these is before step i's use of a buffer: readers wait for it."""
        if 1 <= i <= len(self.steps) and isinstance(self.steps[i - 1], Copy):
            return self.started(i)
        known = [] if access.writes else [*self._of(i, "arrived", awaited, access.buffer)]
        return [Moment(i, "begin"), *known]

    def started(self, i: int) -> list[Moment]:
        """What is before one of these is before all that step i does: a copy moves what it has
        taken a token for."""
        step = self.steps[i - 1]
        known = awaited(step) if isinstance(step, Copy) else ()
        return [Moment(i, "begin"), *(Moment(i, "arrived", name) for name in known)]

    def credited(self, i: int) -> list[Moment]:
        """When step i, which takes credits, has them: at its end, or when it sets a token."""
        sent = [name for name in announced(self.steps[i - 1]) if name in self.tokens]
        return [Moment(i, "end"), *(Moment(i, "announced", name) for name in sent)]

    def _of(self, i: int, what: str, named: Any, buffer: str) -> Iterator[Moment]:
        if 1 <= i <= len(self.steps):
            for name in named(self.steps[i - 1]):
                if buffer in self.buffers_of.get(name, ()):
                    yield Moment(i, what, name)

    def before(self, i: int, a: Access, j: int, b: Access) -> bool:
        """Is step i done with its access before step j begins with its own?

        On every rank, where one of the two is to another rank's memory.
        """
        return self.order.before(self.done(i, a), self.begun(j, b), a.far or b.far)


@dataclass(frozen=True)
class Plan:
    """A rank's program; the same on all ranks."""

    name: str
    mesh: str
    statements: tuple[Statement, ...]
    results: tuple[str, ...] = ()
    stage: str = ""
    place: Place = UNKNOWN

    def of(self, kind: type) -> list:
        """The statements of one kind, in order."""
        return [one for one in self.statements if isinstance(one, kind)]

    @property
    def bare(self) -> Plan:
        """Without choices: what runs, and not why."""
        kept = tuple(one for one in self.statements if not isinstance(one, Choice))
        return replace(self, statements=kept)

    @cached_property
    def moments(self) -> Moments:
        """The order of what happens; found once, since rules and passes ask for it again."""
        return Moments(self.of(Channel), self.steps)

    @property
    def steps(self) -> list[Step]:
        return [one for one in self.statements if isinstance(one, Step)]


def are_apart(plan: Plan, first: str, second: str) -> bool:
    """Is one of two buffers over and done with, on all ranks that touch it, before the other?"""
    moments = plan.moments
    uses: dict[str, list[tuple[int, Access]]] = {first: [], second: []}
    for i, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            if access.buffer in uses:
                uses[access.buffer].append((i, access))
    for name in {first, second} & {*plan.results}:
        uses[name].append((len(plan.steps) + 1, Access(name, False)))
    return any(
        all(i != j and moments.before(i, a, j, b) for i, a in uses[one] for j, b in uses[other])
        for one, other in ((first, second), (second, first))
    )
