"""One execution under control: a chooser that decides every step and hears what each step did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from weft.base.vocabulary import Scope
from weft.emulator.choices import Sight
from weft.emulator.hosts import HostTask
from weft.emulator.memory import Allocation, SyncWord
from weft.emulator.observation import Watch
from weft.emulator.programs import Program
from weft.emulator.shared_access import Completion
from weft.emulator.shared_memory import Barrier, SharedMemory
from weft.emulator.works import BarrierWork, EventRecord, EventWait, KernelWork, WordCopyWork
from weft.verify.exploration.partial_order import Trace
from weft.verify.exploration.visibility import Visibility
from weft.verify.exploration.words import Access, Process, WordKey

# In which order steps are taken where nothing else decides. Waits that pass cost nothing when
# they pass at once; signals are held back, so that waits are there before they are satisfied.
WAIT, PLAIN, SIGNAL = range(3)

SIGNALS = ("add", "set", "update")

# An execution of so many steps is no small world's.
MAX_STEPS = 100_000


class Abandoned(Exception):
    """The execution is not worth going on with; what it would show is known already."""


class Diverged(Exception):
    """The same choices led somewhere else: the subject does not do the same twice."""


class TooLong(Exception):
    """The execution takes more steps than anybody wants to explore."""


class Guide(Protocol):
    """Who decides: which of `enabled` (with their urgency) steps next, and what is left open."""

    def decide(self, execution: Execution, enabled: dict[Process, int]) -> Process: ...

    def choose(self, execution: Execution, options: int, what: str) -> int: ...


class Execution(Watch, Sight):
    """The chooser of one machine; `trace` is what has happened."""

    explores = True

    def __init__(
        self, guide: Guide, *, ordered: frozenset[WordKey] = frozenset(),
        tight: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Additions to `ordered` words do not commute: which of them are seen together matters;
        nor do arrivals at such mbarriers, where there are more than a phase has.

        On `tight` ranks not all programs fit that could be on at a time: who begins and who ends
        first decides who is resident. `crowded` are the ranks of which this execution shows it.
        """
        self.guide = guide
        self.ordered = ordered
        self.tight = tight
        self.crowded: set[int] = set()
        self.trace = Trace()
        self.visibility = Visibility(self.trace)
        self.polls = False
        self._taken: Counter[Process] = Counter()
        self._starts: dict[int, int] = {}
        self._barriers: dict[Any, list[object]] = {}

    # ---- the chooser

    def pick(self, ready: list[Any]) -> int:
        self.trace.end()
        places: dict[Process, int] = {}
        enabled: dict[Process, int] = {}
        for place, task in enumerate(ready):
            urgency = _urgency(task)
            if urgency is not None:
                process = process_of(task)
                places[process] = place
                if urgency == SIGNAL:
                    # Whoever has run ahead comes last: others have waits to reach yet.
                    urgency += self._taken[process]
                enabled[process] = urgency
        if not enabled:
            return -1
        if len(self.trace.steps) >= MAX_STEPS:
            raise TooLong
        process = self.guide.decide(self, enabled)
        self._taken[process] += 1
        place = places[process]
        task = ready[place]
        self.trace.begin(process, after_all=isinstance(task, HostTask) and task.goes_on)
        return place

    def preempts(self) -> bool:
        return True

    def choose(self, options: int, what: str) -> int:
        step = self.trace.current
        if step is None or options < 2:
            return 0
        taken = self.guide.choose(self, options, what)
        step.choices.append((taken, options))
        return taken

    # ---- what happens

    def queued(self, work: Any) -> None:
        self.trace.gave(work)

    def began(self, who: Any) -> None:
        if isinstance(who, Program):
            self.trace.took((who.work, who.program))
        elif not isinstance(who, HostTask):
            self._began_work(who)

    def _began_work(self, work: Any) -> None:
        trace = self.trace
        trace.took(work)
        trace.took(work.stream)
        for key in self._barriers.pop(work.stream, ()):
            trace.took(key)
        if isinstance(work, KernelWork):
            self._room(work)
        elif isinstance(work, EventRecord):
            trace.gave(work.event)
        elif isinstance(work, EventWait):
            trace.took(work.event)
        elif isinstance(work, BarrierWork):
            trace.gave(work.key)
            self._barriers.setdefault(work.stream, []).append(work.key)

    def ended(self, who: Any) -> None:
        if isinstance(who, Program):
            self.trace.gave(who.work.stream)
            self._room(who.work)
        elif not isinstance(who, HostTask):
            self.trace.gave(who.stream)

    def _room(self, work: KernelWork) -> None:
        """Begins and ends of a rank's kernels are in order where its streams could hold more
        programs together than the device."""
        if work.rank in self.tight:
            self.trace.access(Access(("room", work.rank), "update"))
            return
        device, rank = work.stream.device, work.rank
        self._starts[work.stream.number] = max(self._starts.get(work.stream.number, 0), work.total)
        at_once = sum(self._starts.get(stream.number, 0) for stream in device.streams(rank))
        if at_once > device.num_sms:
            self.crowded.add(rank)

    def signalled(self, by, allocation, cell, before, after, place, how, release) -> None:
        word = word_of(allocation, cell)
        kind = "update" if how == "add" and word in self.ordered else how
        hands_on = "" if release is None else release.value
        self.trace.access(Access(word, kind, before, after, hands_on=hands_on))
        published = allocation.sync_word(cell)
        self.visibility.stored(word, by, before, after, published, how, release is not None)

    def seen(
        self, by: Any, allocation: Allocation, cell: int, newest: Any, word: SyncWord,
        suits: Callable[[Any], bool] = lambda value: True,
    ) -> tuple[Any, SyncWord]:  # fmt: skip
        value, published = self.visibility.look(
            word_of(allocation, cell), by, int(newest), word, suits,
            lambda options: self.choose(options, "the value that is seen"),
        )  # fmt: skip
        return type(newest)(value), published

    def passed(self, by, allocation, cell, expected, seen, place, acquire) -> None:
        wait = Access(word_of(allocation, cell), "wait", seen, None, expected)
        self.trace.access(wait)

    def looked(self, by, what, allocation, cell, seen, place, acquire, release=None) -> None:
        # One that hands on what its program knows changes what others learn, if not the value.
        kind = "read" if release is None else "update"
        self.trace.access(Access(word_of(allocation, cell), kind, seen, seen))

    def taken(self, by, allocation, cell, place) -> None:
        word = word_of(allocation, cell)
        self.trace.access(Access(word, "take", 1, 0, hands_on=Scope.SYSTEM.value))
        self.visibility.stored(word, by, 1, 0, allocation.sync_word(cell), "take", True)

    def arrived(self, by: Any, barrier: Barrier, phase: int, commutes: bool) -> None:
        if not commutes:
            self.visibility.unordered.add(barrier.word)
        kind = "disturb" if barrier.word in self.ordered else "arrive"
        self.trace.access(Access(barrier.word, kind, phase, barrier.ended))

    def phase_over(self, by: Any, barrier: Barrier) -> None:
        # The phase before last has this one's parity: then it would have gone on as well.
        ended = barrier.ended
        self.trace.access(Access(barrier.word, "meet", ended, ended, ended - 2))

    def stuck(self, who: Any) -> None:
        waiting = getattr(who, "waiting", None)
        if waiting is None or waiting.expected is None:
            return
        if isinstance(waiting.allocation, SharedMemory):
            barrier = waiting.allocation.barriers.get(waiting.cell)
            if barrier is not None:
                meet = Access(barrier.word, "meet", barrier.ended, None, barrier.ended - 1)
                self.trace.blocked(process_of(who), meet)
            return
        word = word_of(waiting.allocation, waiting.cell)
        expected = None if waiting.is_packet else waiting.expected
        self.trace.blocked(process_of(who), Access(word, "wait", waiting.seen, None, expected))

    def gave(self, key: object) -> None:
        self.trace.gave(key)

    def took(self, key: object) -> None:
        if key == "whatever happens":
            self.polls = True
            self.trace.took_all()
        else:
            self.trace.took(key)


def process_of(task: Any) -> Process:
    """Whose step it is, in words that mean the same in every execution."""
    if isinstance(task, Program):
        return ("program", *task.name)
    if isinstance(task, Completion):
        return ("completion", *task.name)
    if isinstance(task, HostTask):
        return ("host", task.rank)
    stream = task.stream
    return ("stream", stream.rank, stream.device.streams(stream.rank).index(stream))


def _urgency(task: Any) -> int | None:
    """How soon to take this step, None where it cannot be taken."""
    if isinstance(task, Program):
        if task.blocked is not None and task.blocked():
            return None
        if task.coming == "wait":
            return WAIT
        return SIGNAL if task.coming in SIGNALS else PLAIN
    if isinstance(task, Completion):
        return SIGNAL
    if isinstance(task, HostTask):
        return PLAIN
    queue = task.stream.queue
    if not queue or task.stream.active is not None or not queue[0].eligible():
        return None
    return SIGNAL if isinstance(queue[0], WordCopyWork) else PLAIN


def word_of(allocation: Allocation, cell: int) -> WordKey:
    return (allocation.rank, allocation.number, cell * allocation.cell_bytes)
