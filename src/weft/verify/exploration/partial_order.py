"""One execution as a partial order of steps, and the pairs of steps that could go the other way.

Step j comes *after* step i if both are of one process, if i handed something to j (queued work, a
started program, an event, a meeting of hosts), or if they did something to one word that does not
commute. An at-least wait comes after the additions that it has seen. A *race* is a pair with
nothing in between that could also happen in the other order.

Two rules keep waits from multiplying executions:

* An addition behind a wait that had passed already leaves no mark: the other order shows the same
  values and orders more, so that whatever goes wrong in it goes wrong in this one.
* An addition that could have stood in for one that the wait has needed is a race with that one.

An execution in which a wait came behind a write that it did not need, `is_dominated` where with the
wait first all would go the same way, and nothing be ordered that is not: that one shows no less.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.verify.exploration.words import Access, Process, WordKey, passes

# Kinds of accesses that only mbarriers have.
AT_BARRIERS = ("arrive", "disturb", "meet")

# By process, the last step of it that comes before.
Past = dict[Process, int]


@dataclass(slots=True)
class Step:
    """One step; `past` holds, for every process, its last step that comes before, itself included.

    `choices` are (taken, of how many) for what it left open beside its place in the order.
    """

    process: Process
    past: Past
    accesses: list[Access] = field(default_factory=list)
    choices: list[tuple[int, int]] = field(default_factory=list)


class Race(NamedTuple):
    """Step `first` could happen after `second` (indices of steps)."""

    first: int
    second: int


class Trace:
    """The steps of one execution so far; `races` are those found on the way."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.races: list[Race] = []
        self._last: dict[Process, int] = {}
        self._given: dict[object, list[int]] = defaultdict(list)
        self._words: dict[WordKey, list[tuple[int, Access]]] = defaultdict(list)
        self._open = False
        self._before: dict[int, bool] = {}  # steps before the open one by its accesses: a race?
        self._instead: set[int] = set()  # steps for which the open one could have stood in
        self._passed: set[int] = set()  # updates before which the open one, a wait, would pass
        self._needless: set[int] = set()  # writes behind which it knows more, and sees the same
        self.is_dominated = False
        self.ghosts = 0  # steps at the end that never happened: waits that nobody satisfied

    def begin(self, process: Process, *, after_all: bool = False) -> None:
        """The next step is one of `process`; what was open before it is closed."""
        self.end()
        last = self._last.get(process)
        past = {} if last is None else dict(self.steps[last].past)
        self.steps.append(Step(process, past))
        self._open = True
        if after_all:
            self.took_all()

    def end(self) -> None:
        """Close the open step: its races are those with nothing in between."""
        if not self._open:
            return
        self._open = False
        number = len(self.steps) - 1
        step = self.steps[number]
        past = step.past
        found = [i for i in self._before if not self._knows(past, i)]
        earlier = [i for i in self._passed if not self._knows(past, i)]
        needless = [i for i in earlier if i in self._needless]
        for i in found:
            between = any(k != i and self._knows(self.steps[k].past, i) for k in found)
            if self._before[i] and not between:
                self.races.append(Race(i, number))
                needless += [i] if i in self._needless else []
        if any(self._only_loses(i, number) for i in needless):
            self.is_dominated = True
        for i in found:
            _join(past, self.steps[i].past)
        past[step.process] = number
        self._last[step.process] = number
        earlier += [i for i in self._instead if not self._knows(past, i)]
        self.races += [Race(i, number) for i in earlier]
        self._before.clear()
        self._instead.clear()
        self._passed.clear()
        self._needless.clear()

    def _only_loses(self, write: int, wait: int) -> bool:
        """Does nobody learn more if the wait, and what it comes after, go before the write?

        Who comes after the write stays behind it, and so behind what goes before it; only a wait
        could tell.
        """
        return not any(
            access.kind == "wait"
            for step in self.steps[write:wait]
            if self._knows(step.past, write)
            for access in step.accesses
        )

    @property
    def current(self) -> Step | None:
        return self.steps[-1] if self._open else None

    def gave(self, key: object) -> None:
        if self._open:
            self._given[key].append(len(self.steps) - 1)

    def took(self, key: object) -> None:
        if self._open:
            number, past = len(self.steps) - 1, self.steps[-1].past
            for i in self._given.get(key, ()):
                if i != number:
                    _join(past, self.steps[i].past)

    def took_all(self) -> None:
        if self._open:
            for i in self._last.values():
                _join(self.steps[-1].past, self.steps[i].past)

    def is_past(self, number: int, past: Past) -> bool:
        return self._knows(past, number)

    def _knows(self, past: Past, number: int) -> bool:
        return past.get(self.steps[number].process, -1) >= number

    # ------------------------------------------------------------------------------------------

    def access(self, access: Access) -> None:
        """The open step does this now."""
        if not self._open:
            return
        history = self._words[access.word]
        if access.kind == "set":
            access = access._replace(goes_on=self._goes_on(history, access))
        self.steps[-1].accesses.append(access)
        if access.kind == "wait":
            self._order_wait(history, access)
        elif access.kind == "add":
            self._order_add(history, access)
        elif access.kind == "take":
            self._order_take(history)
        elif access.kind in AT_BARRIERS:
            self._order_at_barrier(history, access)
        else:
            self._order_other(history, access)
        history.append((len(self.steps) - 1, access))

    def blocked(self, process: Process, access: Access) -> None:
        """At the end `process` still waits: could it have passed at some earlier moment?"""
        self.begin(process)
        history = self._words[access.word]
        if access.kind == "meet":
            self._order_at_barrier(history, access)
        else:
            self._order_wait(history, access)
        self.end()
        self.ghosts += 1

    def _order_wait(self, history: list[tuple[int, Access]], wait: Access) -> None:
        """After all additions and the last update; passed earlier, it would be a race."""
        mine, seen, based = self.steps[-1].process, wait.before, False
        keeps = True  # does everything behind this write hand on what came before it?
        for i, earlier in reversed(history):
            if not earlier.writes:
                continue
            is_mine = self.steps[i].process == mine
            if earlier.kind == "add":
                could = seen is not None and passes(seen - earlier.change, wait.expected)
                if not (based or is_mine):
                    self._comes_before(i, could)
                    if could:
                        self._needless.add(i)
                continue
            if is_mine:
                return
            if not based:
                self._comes_before(i, False)
            keeps = keeps and (earlier.kind == "update" or earlier.goes_on)
            if passes(earlier.before, wait.expected):
                self._passed.add(i)
                if keeps:
                    self._needless.add(i)
                return
            based = True

    def _order_add(self, history: list[tuple[int, Access]], access: Access) -> None:
        """After the last update and every look since; for adds that waits needed it stands in."""
        mine = self.steps[-1].process
        waits: list[Access] = []
        hidden = False
        for i, earlier in reversed(history):
            is_mine = self.steps[i].process == mine
            if earlier.kind == "wait":
                if not hidden:
                    waits.append(earlier)
                if not is_mine and not passes(access.after, earlier.expected):
                    self._comes_before(i, True)
            elif hidden:
                continue
            elif earlier.kind == "add":
                if not is_mine and any(
                    w.before is not None and not passes(w.before - earlier.change, w.expected)
                    for w in waits
                ):
                    self._instead.add(i)
            else:
                if not is_mine:
                    self._comes_before(i, True)
                hidden = earlier.replaces

    def _order_other(self, history: list[tuple[int, Access]], access: Access) -> None:
        """A look comes after all writes, a write after looks too; an update hides what it follows.

        A wait that would have passed all the same is not looked at, but a set ends what earlier
        releases hand on, so its place before or after a wait matters; unless who sets has made the
        last store too, and hands on what that did.
        """
        mine = self.steps[-1].process
        hidden = False
        ends = access.kind == "set" and not access.goes_on
        for i, earlier in reversed(history):
            if self.steps[i].process != mine:
                if earlier.kind == "wait":
                    gone = ends or not passes(access.after, earlier.expected)
                    if access.writes and gone:
                        self._comes_before(i, True)
                elif not hidden and (earlier.writes or access.writes):
                    self._comes_before(i, True)
            hidden = hidden or earlier.replaces

    def _order_take(self, history: list[tuple[int, Access]]) -> None:
        """After all writes and looks; before one of them only where the word was 1 already."""
        mine = self.steps[-1].process
        hidden = False
        for i, earlier in reversed(history):
            if self.steps[i].process != mine and (earlier.kind == "wait" or not hidden):
                self._comes_before(i, earlier.before == 1)
            hidden = hidden or earlier.replaces

    def _order_at_barrier(self, history: list[tuple[int, Access]], access: Access) -> None:
        """Meetings commute, and arrivals in one phase: in whatever order, the last one ends it.

        A meeting comes after the arrivals that end the phase before, which it needs. Before one of
        those that ended an earlier phase it would have gone on as well, a round too early.
        """
        mine, is_meeting = self.steps[-1].process, access.kind == "meet"
        for i, earlier in reversed(history):
            if self.steps[i].process == mine:
                continue
            if is_meeting and earlier.kind == "arrive":
                passes_before = access.after is not None and earlier.before == access.before
                self._comes_before(i, passes_before)
                if earlier.before == access.expected:
                    self._passed.add(i)
            elif access.kind != earlier.kind or access.kind == "disturb":
                self._comes_before(i, True)
            elif not is_meeting and earlier.before != access.before:
                self._comes_before(i, True)

    def _goes_on(self, history: list[tuple[int, Access]], access: Access) -> bool:
        """Does whoever sees this set know all that who saw the word before it knew?"""
        for i, earlier in reversed(history):
            if earlier.writes:
                return (
                    earlier.kind == "set"
                    and self.steps[i].process == self.steps[-1].process
                    and (not earlier.hands_on or earlier.hands_on == access.hands_on)
                )
        return True

    def _comes_before(self, number: int, is_race: bool) -> None:
        self._before[number] = self._before.get(number, False) or is_race

    # ------------------------------------------------------------------------------------------

    def initials(self, race: Race) -> list[Process]:
        """Who could begin an execution in which `race` goes the other way, from before its first.

        That execution is what came in between and not after the first, then the second: those
        whose step comes after no other of these.
        """
        first, second = race
        head: dict[Process, int] = {}
        begins: list[Process] = []
        for number in range(first + 1, second + 1):
            step = self.steps[number]
            if number != second and self._knows(step.past, first):
                continue
            past = step.past
            if not any(past.get(process, -1) >= start for process, start in head.items()):
                begins.append(step.process)
            head.setdefault(step.process, number)
        return begins


def _join(into: Past, other: Past) -> None:
    for process, number in other.items():
        if into.get(process, -1) < number:
            into[process] = number
