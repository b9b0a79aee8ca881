"""The clocks of one program: what it knows of others' pasts, and what a release hands over."""

from __future__ import annotations

from typing import Any

from weft.base.vocabulary import Scope
from weft.emulator.clocks import Clock, Identity
from weft.emulator.device import Device
from weft.emulator.works import KernelWork


class Knowledge:
    """The clocks of a program and of its asynchronous stores, which are an agent of their own."""

    def __init__(self, device: Device, work: KernelWork, pid: tuple[int, int, int]) -> None:
        checker = device.checker
        self.device = device
        self.scheduler = device.scheduler
        self.waiters = device.waiters
        self.checks = checker.is_on
        self.memory = checker.memory
        self.shadow = checker.shadow
        self.agents = checker.agents
        self.findings = checker.findings
        self.ledger = checker.ledger
        self.watches = checker.watches
        self.sight = checker.sight
        self.work = work
        self.rank = work.rank
        self.locations = work.kernel.locations
        name = work.kernel.name
        call = self.agents.call(work.rank, name, work.number)
        identity = Identity(work.rank, name, pid, call)
        self.agent = self.agents.add(identity, work.stream.number, work.position)
        self.clk = 0
        self.done = 0  # grows with each release before which something was done
        self._did_something = False
        self.clock = work.clock  # shared until this program learns something
        self.segments: dict[Any, int] = {}
        self.async_agent = -1
        self.async_clk = 0
        self.async_done = -1

    def owns(self, segment: int) -> bool:
        agent = self.agents.segment_agent[segment]
        return agent == self.agent or agent == self.async_agent

    def segment(self, loc: int, scope: Scope | None = None) -> int:
        """The number of what this program does now at `loc`."""
        key = loc if scope is None else (loc, scope)
        segment = self.segments.get(key)
        if segment is None:
            place = self.locations[loc]
            segment = self.agents.segment(self.agent, self.clk, place, scope)
            self.segments[key] = segment
            if scope is None:
                self._did_something = True
        return segment

    def async_segment(self, loc: int, scope: Scope | None = None) -> int:
        """The same for an asynchronous (descriptor) store, or reduction, which is atomic."""
        key = ("async", loc, self.async_clk, scope)
        segment = self.segments.get(key)
        if segment is None:
            self._did_something = True
            if self.async_agent < 0:
                identity = self.agents.identity[self.agent]
                self.async_agent = self.agents.add(
                    identity, self.work.stream.number, self.work.position
                )
            segment = self.agents.segment(
                self.async_agent, self.async_clk, self.locations[loc], scope
            )
            self.segments[key] = segment
        return segment

    def complete_stores(self) -> None:
        """All asynchronous stores so far are done, as seen by this program's releases."""
        if self.async_agent >= 0:
            self.async_done = self.async_clk
            self.async_clk += 1

    def learn(self, clocks: list[Clock]) -> None:
        if not clocks:
            return
        self._did_something = True
        if self.clock is self.work.clock:
            self.clock = self.clock.copy()
        for clock in clocks:
            self.clock.join(clock)

    def publish(self) -> Clock:
        """What a release hands over: all that this program knows, and its own past."""
        clock = self.clock.copy()
        clock.learn(self.agent, self.clk)
        if self.async_done >= 0:
            clock.learn(self.async_agent, self.async_done)
        self.clk += 1
        self.done += self._did_something
        self._did_something = False
        self.segments.clear()
        return clock
