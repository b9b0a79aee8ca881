"""Vector clocks: happens-before over the agents of an emulated machine.

An *agent* is whatever has an order of its own: a program, its asynchronous stores, one copy, a
host. Its past is cut into *clock* values by its releases. What one agent does between two
releases at one source line is a *segment*: the number that shadow memory remembers.

A `Clock` says which pasts are known. Programs come by the thousand, so it has two parts: per
stream, up to which position all work has ended (one number covers every agent of that work), and
per agent only what was learnt through signals beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

from immutables import Map

from weft.base.place import UNKNOWN, Place
from weft.base.vocabulary import Scope

# The device of an agent that no device scope includes.
NOWHERE = -1


class _Update:
    """One thing learnt, behind all that was learnt before it; `jump` leads far back.

    Two clocks that come from one share its updates, and find the last one that they share in
    logarithmic time: `jump` depends on `count` alone, so equal counts jump alike.
    """

    __slots__ = ("agent", "clock", "count", "jump", "parent")

    def __init__(self, agent: int, clock: int, parent: _Update | None) -> None:
        self.agent = agent
        self.clock = clock
        if parent is None:
            self.count, self.parent, self.jump = 0, self, self
            return
        self.count, self.parent = parent.count + 1, parent
        far = parent.jump
        is_even = parent.count - far.count == far.count - far.jump.count
        self.jump = far.jump if is_even else parent


def _last_shared(one: _Update, other: _Update) -> _Update | None:
    """The last update that both have behind them; None where they come from different clocks."""
    while one.count > other.count:
        one = one.jump if one.jump.count >= other.count else one.parent
    while other.count > one.count:
        other = other.jump if other.jump.count >= one.count else other.parent
    while one is not other:
        if one.count == 0:
            return None
        if one.jump is other.jump:
            one, other = one.parent, other.parent
        else:
            one, other = one.jump, other.jump
    return one


# Results of merges, by the last updates of the two: they are immutable.
_merged: dict[tuple[_Update, _Update], tuple[Map[int, int], _Update]] = {}
MERGES_KEPT = 256


class Clock:
    """Knowledge of other agents' pasts; see the module's words for its two parts.

    A copy costs nothing, and a join as much as the two have learnt apart from each other: a
    counter that ten thousand programs pass through is linear in them.
    """

    __slots__ = ("_last", "agents", "streams")

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.agents: Map[int, int] = Map()
        self._last = _Update(-1, 0, None)

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.streams = self.streams.copy()
        clock.agents = self.agents
        clock._last = self._last
        return clock

    def learn(self, agent: int, clock: int) -> None:
        """The past of `agent` is known up to and including its `clock`."""
        if self.agents.get(agent, -1) < clock:
            self.agents = self.agents.set(agent, clock)
            self._last = _Update(agent, clock, self._last)

    def join(self, other: Clock) -> None:
        """Learn all that `other` knows."""
        mine = self.streams
        for stream, position in other.streams.items():
            if mine.get(stream, -1) < position:
                mine[stream] = position
        if other._last is self._last:
            return
        shared = _last_shared(self._last, other._last)
        if shared is None:
            self._merge(other)
            return
        start, news = other, self._last
        if self._last.count >= other._last.count:
            start, news = self, other._last
        agents, last = start.agents, start._last
        while news is not shared:
            if agents.get(news.agent, -1) < news.clock:
                agents = agents.set(news.agent, news.clock)
                last = _Update(news.agent, news.clock, last)
            news = news.parent
        self.agents, self._last = agents, last

    def _merge(self, other: Clock) -> None:
        """Join where nothing is shared: what the smaller one knows goes into the larger."""
        large, small = self, other
        if len(self.agents) < len(other.agents):
            large, small = other, self
        # All programs of a kernel start from one clock, and many of them learn the same.
        key = (large._last, small._last)
        found = _merged.get(key)
        if found is None:
            known = large.agents.get
            news = {a: c for a, c in small.agents.items() if known(a, -1) < c}
            # Behind the larger one's updates, which its relatives share with what comes of it.
            last = large._last
            for agent, clock in news.items():
                last = _Update(agent, clock, last)
            found = large.agents.update(news), last
            if len(_merged) >= MERGES_KEPT:
                _merged.clear()
            _merged[key] = found
        self.agents, self._last = found

    def prune(self, registry: Agents) -> None:
        """Forget of single agents what the streams' positions already say."""
        if not self.agents:
            return
        streams = self.streams
        kept = {
            agent: clock
            for agent, clock in self.agents.items()
            if streams.get(registry.stream[agent], -1) < registry.position[agent]
        }
        if len(kept) < len(self.agents):
            self.agents = Map(kept)
            self._last = _Update(-1, 0, None)


def covers(first: Scope | None, second: Scope | None, same_device: bool) -> bool:
    """Do the scopes of two atomic accesses, a release and an acquire say, include both parties?"""
    if first is Scope.SYSTEM and second is Scope.SYSTEM:
        return True
    return same_device and Scope.BLOCK not in (first, second)


@dataclass(frozen=True)
class Identity:
    """An agent as a report names it: a program of a kernel, a copy, or a rank's host code.

    `call` counts the launches of the kernel on its rank from 1 on; 0 where there is none.
    """

    rank: int
    kernel: str
    program: tuple[int, ...] | None = None
    call: int = 0


class Agents:
    """All agents and segments of one machine, by number.

    Segment 0 stands for memory that nothing has written, 1 for values that were there before
    anything ran: everybody knows of those.
    """

    NOTHING = 0
    BEFORE = 1

    def __init__(self) -> None:
        self.identity: list[Identity] = []
        self.device: list[int] = []
        self.stream: list[int] = []
        self.position: list[int] = []
        self.segment_agent: list[int] = [-1, -1]
        self.segment_clock: list[int] = [0, 0]
        self.segment_place: list[Place] = [UNKNOWN, UNKNOWN]
        self.segment_scope: list[Scope | None] = [None, None]
        self.segment_device: list[int] = [-1, -1]
        # When a segment began, in steps of whoever observes the machine; None where nobody does.
        self.segment_step: list[int | None] = [None, None]
        self.step: int | None = None
        # Of a segment of asynchronous stores: the agent that issued them, and its clock then.
        self.issuer: dict[int, tuple[int, int]] = {}
        self._calls: dict[tuple[int, str], dict[int, int]] = {}

    def add(
        self, identity: Identity, stream: int = -1, position: int = 0, device: int | None = None
    ) -> int:
        """A new agent whose work is the `position`-th of `stream` (-1: of no stream).

        `device` is the rank whose device scope includes it: its own, unless said otherwise.
        """
        self.identity.append(identity)
        self.device.append(identity.rank if device is None else device)
        self.stream.append(stream)
        self.position.append(position)
        return len(self.identity) - 1

    def call(self, rank: int, kernel: str, number: int) -> int:
        """Which launch of `kernel` on `rank` the work of this number is."""
        calls = self._calls.setdefault((rank, kernel), {})
        return calls.setdefault(number, len(calls) + 1)

    def segment(self, agent: int, clock: int, place: Place, scope: Scope | None = None) -> int:
        """A new segment; `scope` is given for atomic accesses."""
        self.segment_agent.append(agent)
        self.segment_clock.append(clock)
        self.segment_place.append(place)
        self.segment_scope.append(scope)
        self.segment_device.append(self.device[agent])
        self.segment_step.append(self.step)
        return len(self.segment_agent) - 1

    def known(self, segment: int, clock: Clock) -> bool:
        """Is all that happened in `segment` ordered before one whose knowledge is `clock`?"""
        if segment <= Agents.BEFORE:
            return True
        agent = self.segment_agent[segment]
        if clock.streams.get(self.stream[agent], -1) >= self.position[agent]:
            return True
        return clock.agents.get(agent, -1) >= self.segment_clock[segment]

    def covers(self, first: int, second: int) -> bool:
        """Do the scopes of two atomic segments include each other's agents?"""
        same_device = self.segment_device[first] == self.segment_device[second]
        return covers(self.segment_scope[first], self.segment_scope[second], same_device)
