"""Events of a machine, for pictures, searches for a cause and explorers.

A `Watch` is called for everything that synchronises, with the machine's own objects. `Observation`
is the one that makes plain records: it hands an `Event` each to `Observer`s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from weft.base.place import UNKNOWN, Place
from weft.base.report import Finding
from weft.base.vocabulary import Scope
from weft.emulator.clocks import Agents, covers
from weft.emulator.memory import Allocation
from weft.emulator.scheduler import Waiter, Waiting
from weft.emulator.shared_memory import Barrier

# So many events a recorder keeps by default.
EVENTS_KEPT = 100_000


class Party(NamedTuple):
    """The party that does something.

    `what` is "host", "kernel NAME", "copy engine" or the kind of another work; `launch` is the
    number of the work on its rank, so that two launches of one kernel differ (0 for the host).
    """

    rank: int
    what: str
    stream: str = ""
    program: tuple[int, int, int] | None = None
    launch: int = 0


class Word(NamedTuple):
    """A signal word: an element of `tensor` on `rank`; `address` is stable within a run."""

    tensor: str
    rank: int
    index: int | tuple[int, ...]
    address: int


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `step` counts them.

    kinds  queue   the host queues work (text: which); `party` is the work
           begin, end   a program, a copy, a torch operation, a host
           signal  a word changed from `before` to `after` (text: add, set or update)
           wait    a wait begins: `expected` (None: any other value), `before` is what it sees
           pass    it is satisfied; `causes` are the steps of the signals that it acquired
           load, test   an atomic look at a word that changes nothing
           stuck   in a deadlock: what the party waits for
           finding   text is its kind
    """

    step: int
    kind: str
    party: Party
    place: Place
    word: Word | None = None
    before: int | None = None
    after: int | None = None
    expected: int | None = None
    causes: tuple[int, ...] = ()
    text: str = ""


class Observer(Protocol):
    def happened(self, event: Event) -> None: ...


class Recorder:
    """Keeps the last `limit` events; `dropped` says how many earlier ones are gone."""

    def __init__(self, limit: int = EVENTS_KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self.seen = 0

    @property
    def events(self) -> list[Event]:
        return list(self._events)

    @property
    def dropped(self) -> int:
        return self.seen - len(self._events)

    def happened(self, event: Event) -> None:
        self.seen += 1
        self._events.append(event)


class Watch:
    """Callbacks for everything that synchronises, at the moment it does; each does nothing here.

    `by` is the party that does it. `how` a word changes: "add" where nobody gets the old value,
    "set" where it does not matter, else "update".
    """

    def queued(self, work: Any) -> None: ...

    def began(self, who: Any) -> None:
        """`who` is a Program, a HostTask or a Work (of a kernel: the launch)."""

    def ended(self, who: Any) -> None: ...

    def signalled(
        self, by: Any, allocation: Allocation, cell: int, before: int | None, after: int,
        place: Place, how: str, release: Scope | None,
    ) -> None: ...  # fmt: skip

    def waits(self, by: Waiter, waiting: Waiting) -> None: ...

    def passed(
        self, by: Any, allocation: Allocation, cell: int, expected: int, seen: int,
        place: Place, acquire: Scope | None,
    ) -> None: ...  # fmt: skip

    def looked(
        self, by: Any, what: str, allocation: Allocation, cell: int, seen: int, place: Place,
        acquire: Scope | None, release: Scope | None = None,
    ) -> None: ...  # fmt: skip

    def taken(self, by: Any, allocation: Allocation, cell: int, place: Place) -> None:
        """A stream has seen 1 in the word, acquired, and stored 0, both at system scope."""

    def arrived(self, by: Any, barrier: Barrier, phase: int, commutes: bool) -> None:
        """Somebody has arrived in that phase of an mbarrier, or bytes have, and may have ended it.

        It `commutes` with others of its phase unless there was more of it than the phase has.
        """

    def phase_over(self, by: Any, barrier: Barrier) -> None:
        """A wait at an mbarrier goes on: the phase that is on is of the other parity."""

    def gave(self, key: object) -> None:
        """What has happened so far in this step is before all that takes `key` from now on."""

    def took(self, key: object) -> None: ...

    def stuck(self, who: Any) -> None: ...

    def found(self, finding: Finding) -> None: ...


class Observation(Watch):
    """Makes events of what happens and hands them to the observers."""

    def __init__(self, agents: Agents, observers: list[Observer]) -> None:
        self.agents = agents
        self.observers = observers
        self._step = 0
        self._words: dict[tuple[int, int], Word] = {}
        # The signals that a wait may acquire, by word: (step, device, scope).
        self._signals: dict[tuple[int, int], list[tuple[int, int, Scope]]] = {}

    def queued(self, work: Any) -> None:
        self._emit("queue", _party_of(work), work.place, text=work.describe())

    def began(self, who: Any) -> None:
        self._emit("begin", _party_of(who), self._place(who))

    def ended(self, who: Any) -> None:
        self._emit("end", _party_of(who), self._place(who))

    def signalled(self, by, allocation, cell, before, after, place, how, release) -> None:
        word = self._word(allocation, cell)
        step = self._emit(
            "signal", _party_of(by), place, word=word, before=before, after=after, text=how
        )
        key = (allocation.address, cell)
        if how == "set":
            self._signals.pop(key, None)
        if release is not None:
            device = self.agents.device[by.agent]
            self._signals.setdefault(key, []).append((step, device, release))

    def waits(self, by, waiting) -> None:
        self._emit(
            "wait", _party_of(by), waiting.place,
            word=self._word(waiting.allocation, waiting.cell), before=waiting.seen,
            expected=waiting.expected,
        )  # fmt: skip

    def passed(self, by, allocation, cell, expected, seen, place, acquire) -> None:
        self._emit(
            "pass", _party_of(by), place, word=self._word(allocation, cell), before=seen,
            expected=expected, causes=self._causes(by, allocation, cell, acquire),
        )  # fmt: skip

    def looked(self, by, what, allocation, cell, seen, place, acquire, release=None) -> None:
        self._emit(
            what, _party_of(by), place, word=self._word(allocation, cell), before=seen,
            causes=self._causes(by, allocation, cell, acquire),
        )  # fmt: skip

    def taken(self, by, allocation, cell, place) -> None:
        self.passed(by, allocation, cell, 1, 1, place, Scope.SYSTEM)
        self.signalled(by, allocation, cell, 1, 0, place, "set", Scope.SYSTEM)

    def stuck(self, who: Any) -> None:
        waiting = getattr(who, "waiting", None)
        if waiting is None:
            self._emit("stuck", _party_of(who), self._place(who), text=str(who.why))
            return
        self._emit(
            "stuck", _party_of(who), waiting.place,
            word=self._word(waiting.allocation, waiting.cell), expected=waiting.expected,
            before=waiting.seen,
        )  # fmt: skip

    def found(self, finding: Finding) -> None:
        side = finding.first
        rank = -1 if side.rank is None else side.rank
        program = None if side.program is None else (*side.program, 0, 0)[:3]
        party = Party(rank, "host" if side.kernel is None else f"kernel {side.kernel}", "", program)
        self._emit("finding", party, side.place, text=finding.kind)

    # ------------------------------------------------------------------------------------------

    def _emit(self, kind: str, party: Party, place: Place, **fields: Any) -> int:
        step = self._step
        self._step += 1
        self.agents.step = step
        event = Event(step, kind, party, place, **fields)
        for observer in self.observers:
            observer.happened(event)
        return step

    def _causes(self, by, allocation, cell, acquire: Scope | None) -> tuple[int, ...]:
        if acquire is None:
            return ()
        own = self.agents.device[by.agent]
        return tuple(
            step
            for step, device, scope in self._signals.get((allocation.address, cell), ())
            if covers(scope, acquire, device == own)
        )

    def _word(self, allocation: Allocation, cell: int) -> Word:
        key = (allocation.address, cell)
        word = self._words.get(key)
        if word is None:
            address = allocation.address + cell * allocation.cell_bytes
            index = allocation.index(address, allocation.cell_bytes)
            word = self._words[key] = Word(allocation.name, allocation.rank, index, address)
        return word

    @staticmethod
    def _place(who: Any) -> Place:
        work = getattr(who, "work", None)
        return getattr(work if work is not None else who, "place", UNKNOWN)


def _party_of(who: Any) -> Party:
    """Of a Program, an Actor, a Work or a HostTask."""
    work = getattr(who, "work", None)
    if work is None and hasattr(who, "stream"):
        work = who
    if work is None:
        return Party(who.rank, "host")
    program = getattr(who, "program", None)
    return Party(work.rank, _what(work), work.stream.name, program, work.number)


def _what(work: Any) -> str:
    kernel = getattr(work, "kernel", None)
    if kernel is not None:
        return f"kernel {kernel.name}"
    return "copy engine" if "copy" in work.kind else work.kind
