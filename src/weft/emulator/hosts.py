"""A rank's host code: a thread that runs only while it holds the baton."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.base.place import UNKNOWN, Place
from weft.emulator.clocks import Clock, Identity
from weft.emulator.whereabouts import whereabouts

if TYPE_CHECKING:
    from weft.emulator.machine import Machine

# Which host's thread is running, for code that is called from it.
THREAD = threading.local()

# After Ctrl-C a rank's own code may take so long to unwind.
UNWIND_S = 2.0


def closed() -> threading.Lock:
    """A lock that one thread takes and another one gives: cheaper than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class HostTask:
    """One rank's host code: a thread that runs only while it holds the baton."""

    def __init__(self, machine: Machine, rank: int, main: Callable[[], Any]) -> None:
        self.machine = machine
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
        self.agent = machine.agents.add(Identity(rank, "host"))
        self.clk = 0
        self._go = closed()
        self._thread = threading.Thread(target=self._run, name=f"weft-rank{rank}", daemon=True)
        self._started = False

    def _run(self) -> None:
        self._go.acquire()
        THREAD.host = self
        try:
            if not self.aborted:
                self.result = self.main()
        except Aborted:
            pass
        except BaseException as error:  # the session decides what to do with it
            self.error = error
        self.ended = True
        self.machine.progress += 1
        self.machine.hosts_may_go = True
        self.machine.baton.release()

    def step(self) -> None:
        """Called by the scheduler: lets the thread run until it waits or ends."""
        self.machine.enter_rank(self.rank)
        self.condition = None
        if not self._started:
            self._started = True
            for watch in self.machine.watches:
                watch.began(self)
            self._thread.start()
        self._go.release()
        try:
            self.machine.baton.acquire()
        except KeyboardInterrupt:
            where = whereabouts(self.machine)
            self._unwind()
            raise KeyboardInterrupt(where) from None
        if self.ended:
            for watch in self.machine.watches:
                watch.ended(self)
        self.machine.hosts_may_go = True

    @property
    def thread_id(self) -> int:
        return self._thread.ident or 0

    def _unwind(self) -> None:
        """End a thread that has the baton: it may loop for ever and never give it back."""
        self.aborted = True
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Aborted))
        if not self.machine.baton.acquire(timeout=UNWIND_S):
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
        self.machine.waiting_hosts.append(self)
        self.machine.baton.release()
        self._go.acquire()
        if self.aborted:
            raise Aborted
        return not self.goes_on

    def abort(self) -> None:
        """End a thread that waits for something that will not come."""
        self.aborted = True
        if not self.ended:
            self.step()


class Aborted(BaseException):
    """Unwinds the host code of a run that was given up."""
