"""The ranks' host code: a thread for each, which runs only while it holds the baton."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

from weft.base.place import UNKNOWN, Place
from weft.base.user_place import user_place
from weft.emulator.clocks import Agents, Clock, Identity
from weft.emulator.observation import Watch
from weft.emulator.scheduler import Scheduler
from weft.emulator.whereabouts import where_host

# Which host's thread is running, for code that is called from it.
_THREAD = threading.local()

# After Ctrl-C a rank's own code may take so long to unwind.
UNWIND_S = 2.0

# So often a thread that waits for a rank's looks up: a signal that came to another thread, or just
# before the wait, does not end it, and Python handles it only between two of this thread's steps.
LOOK_S = 0.2


class Hosts:
    """The hosts of one machine, by rank. `on_switch(rank)` is called before another rank's runs."""

    def __init__(self, scheduler: Scheduler, agents: Agents, watches: list[Watch]) -> None:
        self.scheduler = scheduler
        self.agents = agents
        self.watches = watches
        self.by_rank: dict[int, HostTask] = {}
        self.on_switch: Callable[[int], None] = lambda rank: None
        self.baton = _closed()
        self.waiting: list[HostTask] = []
        self._in_front = -1
        scheduler.wake_hosts = self._wake

    def __iter__(self) -> Iterator[HostTask]:
        return iter(self.by_rank.values())

    def add(self, rank: int, main: Callable[[], Any]) -> HostTask:
        """Let `main` run as the host code of `rank`, on a thread of its own."""
        host = self.by_rank[rank] = HostTask(self, rank, main)
        self.scheduler.make_ready(host)
        return host

    def current(self) -> HostTask:
        """The host whose code calls."""
        host = getattr(_THREAD, "host", None)
        if host is None or host.hosts is not self:
            raise RuntimeError("this is for the host code of an emulated rank")
        return host

    def wait(self, condition: Callable[[], bool], why: object, *, may_go_on: bool = False) -> bool:
        """Set the calling host aside until `condition()` holds.

        `why` becomes text only when a report asks for it; its `remedy`, if it has one, is then the
        report's. A host that `may_go_on` waits where a GPU's would not: it is let go, and False
        returned, before the machine calls it a deadlock.
        """
        host = self.current()
        return condition() or host.wait(condition, why, user_place(), may_go_on)

    def publish(self, rank: int) -> Clock:
        """What the host of `rank` hands over to work that it queues."""
        host = self.by_rank.get(rank)
        if host is None:
            return Clock()
        host.clock.prune(self.agents)
        clock = host.clock.copy()
        clock.learn(host.agent, host.clk)
        host.clk += 1
        return clock

    def enter(self, rank: int) -> None:
        if rank != self._in_front:
            self._in_front = rank
            self.on_switch(rank)

    def _wake(self) -> None:
        """Let those go on whose condition holds."""
        self.scheduler.hosts_may_go = False
        still = []
        for host in self.waiting:
            if host.condition is not None and host.condition():
                self.scheduler.make_ready(host)
            else:
                still.append(host)
        self.waiting = still

    def let_go_on(self) -> bool:
        """Nobody can go on, but a GPU's host would: let it queue what it would have run."""
        hosts = [host for host in self.waiting if host.may_go_on]
        for host in hosts:
            host.goes_on = True
            self.scheduler.make_ready(host)
        self.waiting = [host for host in self.waiting if not host.may_go_on]
        self.scheduler.progress += bool(hosts)
        return bool(hosts)

    @property
    def have_ended(self) -> bool:
        return all(host.ended for host in self)

    @property
    def have_failed(self) -> bool:
        """Has the code of one of them raised an error?"""
        return any(host.error for host in self)

    def end(self) -> None:
        """End all that wait for something that will not come."""
        for host in self:
            host.abort()
        self._in_front = -1


class HostTask:
    """One rank's host code."""

    blocked = None

    def __init__(self, hosts: Hosts, rank: int, main: Callable[[], Any]) -> None:
        self.hosts = hosts
        self.rank = rank
        self.main = main
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.condition: Callable[[], bool] | None = None
        self.why: object = ""
        self.place = UNKNOWN
        self.aborted = False
        self.may_go_on = False
        self.goes_on = False
        self.clock = Clock()
        self.agent = hosts.agents.add(Identity(rank, "host"))
        self.clk = 0
        self._go = _closed()
        self._thread = threading.Thread(target=self._run, name=f"weft-rank{rank}", daemon=True)
        self._started = False

    def _run(self) -> None:
        self._go.acquire()
        _THREAD.host = self
        try:
            if not self.aborted:
                self.result = self.main()
        except Aborted:
            pass
        except BaseException as error:  # the session decides what to do with it
            self.error = error
        self.ended = True
        self.hosts.scheduler.host_changed()
        self.hosts.baton.release()

    def step(self) -> None:
        """Called by the scheduler: lets the thread run until it waits or ends."""
        hosts = self.hosts
        hosts.enter(self.rank)
        self.condition = None
        if not self._started:
            self._started = True
            for watch in hosts.watches:
                watch.began(self)
            self._thread.start()
        try:
            # Within: Ctrl-C may come as soon as the thread runs, before this one waits for it.
            self._go.release()
            while not hosts.baton.acquire(timeout=LOOK_S):
                pass
        except KeyboardInterrupt:
            where = where_host(self.rank, self._thread.ident)
            self._unwind()
            raise KeyboardInterrupt(where) from None
        if self.ended:
            for watch in hosts.watches:
                watch.ended(self)
        hosts.scheduler.hosts_may_go = True

    def _unwind(self) -> None:
        """End a thread that has the baton: it may loop for ever and never give it back."""
        self.aborted = True
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Aborted))
        if not self.hosts.baton.acquire(timeout=UNWIND_S):
            self.ended = True  # within a call that does not return: the process's end ends it

    def wait(
        self, condition: Callable[[], bool], why: object, place: Place, may_go_on: bool
    ) -> bool:
        """Called by the thread: gives the baton back until `condition()` holds.

        Says whether it does: where nobody else can go on, one that `may_go_on` need not wait.
        """
        if self.aborted:  # a `finally` of code that is being unwound waits for nobody
            raise Aborted
        self.condition = condition
        self.why = why
        self.place = place
        self.may_go_on = may_go_on
        self.goes_on = False
        self.hosts.waiting.append(self)
        self.hosts.baton.release()
        self._go.acquire()
        if self.aborted:
            raise Aborted
        return not self.goes_on

    def abort(self) -> None:
        """End a thread that waits for something that will not come."""
        if not self.ended:
            self.aborted = True
            self.step()


class Aborted(BaseException):
    """Unwinds the host code of a run that was given up."""


def _closed() -> threading.Lock:
    """A lock that one thread takes and another one gives: cheaper than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock
