"""The emulated machine: its parts put together, and how a run of it goes on until its end.

`scheduler.py` says whose turn it is and who waits, `hosts.py` runs the ranks' host code,
`device.py` holds their streams, `programs.py` what runs on them, `accesses.py` what is checked. The
next task is drawn from a seeded generator: a seed is a schedule, and a schedule can be run again.
Nothing ever just hangs: a deadlock is reported with all waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from greenlet import getcurrent
from threadpoolctl import ThreadpoolController

from weft.base.report import Finding, Report
from weft.base.topology import Topology
from weft.emulator.accesses import Checker
from weft.emulator.choices import Chooser, Seeded
from weft.emulator.deadlock import Deadlock, with_room
from weft.emulator.device import Device
from weft.emulator.hosts import Hosts
from weft.emulator.observation import Observer
from weft.emulator.programs import Program, Residency
from weft.emulator.rewriting import Rewrite
from weft.emulator.scheduler import Scheduler, Waiters
from weft.emulator.whereabouts import where_program

# So many objects may be made before the garbage collector looks at them.
OBJECTS_A_LOOK = 50_000
# So often may every spinning program look again, with nothing having changed, before it is stuck.
IDLE_ROUNDS = 3


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Look for garbage less often: a run makes many objects, few of them in cycles.

    With Python's own threshold a quarter of a run's time goes into looking.
    """
    before = gc.get_threshold()
    if before[0]:  # zero: never
        gc.set_threshold(max(before[0], OBJECTS_A_LOOK), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


class Machine:
    """An emulated machine of as many devices as `topology` has ranks, on its nodes.

    `num_sms` programs can be resident on one rank at a time. `chooser` takes every decision that
    a schedule is made of; `observers` receive events; `rewrite` may change kernels and queued work
    before they run.
    """

    def __init__(
        self, topology: Topology | int, *, seed: int = 0, num_sms: int = 132,
        arch: int = 0, name: str = "program", chooser: Chooser | None = None,
        observers: Sequence[Observer] = (), rewrite: Rewrite | None = None,
    ) -> None:  # fmt: skip
        if isinstance(topology, int):
            topology = Topology.of(topology)
        chooser = chooser or Seeded(seed)
        self.topology = topology
        self.rewrite = rewrite or Rewrite()
        self.checker = checker = Checker(name, topology.num_ranks, chooser, observers)
        self.memory = checker.memory
        self.findings = findings = checker.findings
        findings.is_enough = self.rewrite.is_enough
        self.scheduler = Scheduler(chooser, lambda: findings.enough)
        self.waiters = Waiters(self.scheduler)
        self.hosts = Hosts(self.scheduler, checker.agents, checker.watches)
        self.device = Device(
            topology, num_sms, checker, self.scheduler, self.waiters, self.hosts,
            self.rewrite.position, arch,
        )  # fmt: skip
        self.residency = Residency(self.device, self.rewrite.reached)
        self._crowding: list[Finding] = []
        self.left_behind = ""  # who waits for whom since a rank's code raised an error

    @property
    def report(self) -> Report:
        return self.findings.report

    @property
    def error(self) -> Exception | None:
        """What the first finding raises."""
        return self.findings.error

    def run(self) -> Report:
        """Run until every host has ended and every stream is empty, or nobody can go on."""
        scheduler = self.scheduler
        scheduler.hub, before = getcurrent(), scheduler.steps
        scheduler.most_steps = self.rewrite.most_steps
        try:
            # A tile is too small to share out: BLAS threads would only get in each other's way.
            with _blas().limit(limits=1, user_api="blas"), _little_garbage():
                self._run()
        except KeyboardInterrupt as error:
            if error.args:  # a host has said it
                raise
            where = where_program(scheduler.running, error.__traceback__)
            raise KeyboardInterrupt(where) from None
        finally:
            self.hosts.end()
            self.rewrite.steps += scheduler.steps - before
        return self.report

    def _run(self) -> None:
        scheduler, idle_rounds, progress = self.scheduler, 0, -1
        self.residency.room, self._crowding, self.left_behind = self.device.num_sms, [], ""
        while True:
            if scheduler.take_turns():
                return
            if self.hosts.have_ended and self.device.idle:
                self._end()
                return
            # Spins that were set aside may have been waiting for something else than the word
            # that they looked at last: let all of them look again.
            if scheduler.ready:
                scheduler.try_blocked()
            idle_rounds = idle_rounds + 1 if scheduler.progress == progress else 1
            progress = scheduler.progress
            if idle_rounds > IDLE_ROUNDS or not self.waiters.wake_spins():
                if not self.hosts.let_go_on() and not self._made_room():
                    return

    def _end(self) -> None:
        """Everybody has ended: what was wrong on the way, seen from here?"""
        if self._crowding:
            self._file(with_room(self._crowding, self.residency.room))
        if not self.hosts.have_failed:
            self.checker.ledger.close()

    def _made_room(self) -> bool:
        """Nobody can go on. Where programs found no room, find out with how much they would."""
        deadlock = Deadlock(self.device, self.residency.unstarted())
        if not self._crowding:
            stuck = [*deadlock.stuck, *(host for host in self.hosts if not host.ended)]
            for watch in self.checker.watches:
                for one in stuck:
                    watch.stuck(one)
        if deadlock.unstarted and not self.scheduler.explores and not self.findings.failed:
            self._crowding = self._crowding or deadlock.findings()
            self.residency.make_room()
            return True
        self._file(deadlock.findings())
        if self.hosts.have_failed:
            self.left_behind = deadlock.left_behind()
        return False

    def _file(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.findings.find(finding)

    def close(self) -> None:
        """End the programs that are left: of a suspended one nothing would ever be freed.

        Its frames hold the machine, and no garbage collector looks into a coroutine's frames.
        """
        for task in [*self.waiters.all(), *self.scheduler.ready]:
            if isinstance(task, Program):
                task.kill()
        self.waiters.clear()
        self.scheduler.ready.clear()
