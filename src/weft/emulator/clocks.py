"""Who knows of whose past: happens-before over the agents of an emulated machine.

An *agent* is whatever has an order of its own: a program, its asynchronous stores, one copy, a
host. Its past is cut into *clock* values by its releases. What one agent does between two
releases at one source line is a *segment*: the number that shadow memory remembers.

A `Clock` says which pasts are known. Programs come by the thousand, so it has two parts: per
stream, up to which position all work has ended (one number covers every agent of that work), and
per agent only what was learnt through signals beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.place import UNKNOWN, Place
from weft.base.vocabulary import Scope


class Clock:
    """Knowledge of other agents' pasts; see the module's words for its two parts."""

    __slots__ = ("agents", "streams")

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.agents: dict[int, int] = {}

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.streams = self.streams.copy()
        clock.agents = self.agents.copy()
        return clock

    def join(self, other: Clock) -> None:
        """Learn all that `other` knows."""
        mine = self.streams
        for stream, position in other.streams.items():
            if mine.get(stream, -1) < position:
                mine[stream] = position
        agents = self.agents
        for agent, clock in other.agents.items():
            if agents.get(agent, -1) < clock:
                agents[agent] = clock

    def prune(self, registry: Agents) -> None:
        """Forget of single agents what the streams' positions already say."""
        if not self.agents:
            return
        streams = self.streams
        covered = [
            agent
            for agent in self.agents
            if streams.get(registry.stream[agent], -1) >= registry.position[agent]
        ]
        for agent in covered:
            del self.agents[agent]


@dataclass(frozen=True)
class Identity:
    """Whom a report names: a program of a kernel, a copy, or a rank's host code."""

    rank: int
    kernel: str
    program: tuple[int, ...] | None = None


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

    def segment(self, agent: int, clock: int, place: Place, scope: Scope | None = None) -> int:
        """A new segment; `scope` is given for atomic accesses."""
        self.segment_agent.append(agent)
        self.segment_clock.append(clock)
        self.segment_place.append(place)
        self.segment_scope.append(scope)
        self.segment_device.append(self.device[agent])
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
        first_scope, second_scope = self.segment_scope[first], self.segment_scope[second]
        if first_scope is Scope.SYSTEM and second_scope is Scope.SYSTEM:
            return True
        same_device = self.segment_device[first] == self.segment_device[second]
        return same_device and first_scope is not Scope.BLOCK and second_scope is not Scope.BLOCK
