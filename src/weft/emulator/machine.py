"""The emulated machine: ranks with memory and streams, and the scheduler that runs them all.

Exactly one thing runs at a time: a host (a thread per rank), a program (a coroutine), a copy.
Who is next is drawn from a seeded generator, so a seed is a schedule and a schedule can be run
again. Host code runs until it waits; device code until it synchronises. Nothing ever just hangs:
when nobody can go on, the machine says who waits for what.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from greenlet import GreenletExit, getcurrent
from threadpoolctl import ThreadpoolController

from weft.base.counts import counted
from weft.base.errors import ResidencyError
from weft.base.hardware import Hardware
from weft.base.place import Place
from weft.base.report import Finding, Report
from weft.base.topology import Topology
from weft.base.user_place import user_place
from weft.emulator.actors import Actor
from weft.emulator.choices import Chooser, Seeded, Sight
from weft.emulator.clocks import Agents, Clock
from weft.emulator.deadlock import deadlock, with_room
from weft.emulator.findings import Findings
from weft.emulator.hosts import THREAD, HostTask, closed
from weft.emulator.ledger import Ledger
from weft.emulator.memory import Allocation, Memory
from weft.emulator.observation import Observation, Observer, Watch
from weft.emulator.programs import Program
from weft.emulator.rewriting import NoEnd, Rewrite
from weft.emulator.shadow import Shadow
from weft.emulator.simulated_time import SimulatedTime
from weft.emulator.streams import KernelWork, Stream, TokenWork, Work
from weft.emulator.synchronising import SIGNALS_IN_A_TILE
from weft.emulator.whereabouts import running

# So many objects may be made before the garbage collector looks at them.
OBJECTS_A_LOOK = 50_000
# So often may every spinning program look again, with nothing having changed, before it is stuck.
IDLE_ROUNDS = 3


@dataclass(frozen=True)
class HeapView:
    """What `at` needs of one world, as seen from one rank: heap base and reach of each peer."""

    rank: int
    bases: tuple[int, ...]
    near: tuple[bool, ...]
    nbytes: int

    @property
    def num_ranks(self) -> int:
        return len(self.bases)


class _Activation:
    """The scheduler's choice to start the next work of one rank's streams."""

    __slots__ = ("machine", "stream")

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self.machine = machine
        self.stream = stream

    @property
    def rank(self) -> int:
        return self.stream.rank

    def step(self) -> None:
        self.machine._activate(self.stream)


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

    `num_sms` programs can be resident on one rank at a time. `checks` turns the race,
    initialisation and bounds checks on. With `hardware` it keeps simulated time. `chooser` takes
    every decision that a schedule is made of; `observers` are told what happens; `rewrite` may
    change kernels and queued work before they run.
    """

    def __init__(
        self, topology: Topology | int, *, seed: int = 0, num_sms: int = 132, checks: bool = True,
        name: str = "program", hardware: Hardware | None = None, chooser: Chooser | None = None,
        observers: Sequence[Observer] = (), rewrite: Rewrite | None = None,
    ) -> None:  # fmt: skip
        if isinstance(topology, int):
            topology = Topology.of(topology)
        num_ranks = topology.num_ranks
        self.topology = topology
        self.num_ranks = num_ranks
        self.num_nodes = topology.num_nodes
        self._nodes = [topology.seat(rank).node for rank in range(num_ranks)]
        self.seed = seed
        self.num_sms = self._room = num_sms
        self._crowding: list[Finding] = []
        self.running: Any = None  # whose turn it is
        self.checks = checks
        self.memory = Memory()
        self.agents = Agents()
        self.shadow = Shadow(self.agents)
        self.findings = Findings(name, num_ranks, self.agents)
        self.heaps: dict[int, HeapView] = {}
        self.barriers: dict[Any, list[Work]] = {}
        self.hosts: dict[int, HostTask] = {}
        self.waiting_hosts: list[HostTask] = []
        self.hosts_may_go = False
        self.on_switch: Callable[[int], None] = lambda rank: None
        self.progress = 0
        self.hub = getcurrent()
        self.all_streams: dict[tuple[int, str], Stream] = {}
        self.chooser = chooser or Seeded(seed)
        self.explores = self.chooser.explores
        self.watches: list[Watch] = []
        self.sight: Sight | None = chooser if isinstance(chooser, Sight) else None
        self._ready: list[Any] = []
        self._waiters: dict[tuple[int, int], list[Program | TokenWork]] = {}
        self._resident: Counter[int] = Counter()
        self._kernels: dict[int, list[KernelWork]] = {rank: [] for rank in range(num_ranks)}
        self.signallers: dict[tuple[Any, int], set[Place]] = {}
        self._sequence = 0
        self._numbers: Counter[int] = Counter()
        self._rank_in_front = -1
        self.baton = closed()
        self.rewrite = rewrite or Rewrite()
        self.findings.is_enough = self.rewrite.is_enough
        self.steps = 0
        self.time: SimulatedTime | None = None
        self._program_type = Program
        if isinstance(chooser, Watch):
            self.watch(chooser)
        if observers:
            self.watch(Observation(self.agents, list(observers)))
        self.ledger = Ledger(self.agents, self.shadow, self.findings) if checks else None
        if self.ledger is not None:  # behind the observers: they hear of a signal before its fault
            self.watch(self.ledger)
            self.findings.weak_link = self.ledger.weak_link
            self.findings.overwritten = self.shadow.overwritten.get
        if hardware is not None:
            from weft.emulator.timed_program import TimedProgram

            self.time = SimulatedTime(hardware, self)
            self._program_type = TimedProgram

    @property
    def report(self) -> Report:
        return self.findings.report

    @property
    def error(self) -> Exception | None:
        """What the first finding raises."""
        return self.findings.error

    def watch(self, watch: Watch) -> None:
        """Tell `watch` of all that happens from now on."""
        self.watches.append(watch)
        self.findings.watches = self.watches

    # ------------------------------------------------------------------------------------------
    # For host code

    def add_host(self, rank: int, main: Callable[[], Any]) -> HostTask:
        """Let `main` run as the host code of `rank`, on a thread of its own."""
        host = HostTask(self, rank, main)
        self.hosts[rank] = host
        self._ready.append(host)
        return host

    def current_rank(self) -> int:
        """The rank whose host code calls."""
        return self.current_host().rank

    def current_host(self) -> HostTask:
        host = getattr(THREAD, "host", None)
        if host is None or host.machine is not self:
            raise RuntimeError("this is for the host code of an emulated rank")
        return host

    def stream(self, rank: int, name: str = "main") -> Stream:
        """The stream `name` of `rank`, made on first use."""
        stream = self.all_streams.get((rank, name))
        if stream is None:
            stream = Stream(self, rank, name, len(self.all_streams))
            self.all_streams[(rank, name)] = stream
        return stream

    def streams(self, rank: int) -> list[Stream]:
        return [stream for (owner, _), stream in self.all_streams.items() if owner == rank]

    def host_wait(
        self, condition: Callable[[], bool], why: object,
        join: Callable[[], Iterable[Clock]] = tuple, *, may_go_on: bool = False,
    ) -> bool:  # fmt: skip
        """Set the calling host aside until `condition()` holds, then let it know `join()`.

        `why` becomes text only when a report asks for it. A host that `may_go_on` waits where a
        GPU's would not: it is let go, and False returned, before the machine calls it a deadlock.
        """
        host = self.current_host()
        if not condition() and not host.wait(condition, why, user_place(), may_go_on):
            return False
        for clock in join():
            host.clock.join(clock)
        return True

    def host_changed(self) -> None:
        """Something that hosts may be waiting for has happened."""
        self.progress += 1
        self.hosts_may_go = True

    def host_publish(self, rank: int) -> Clock:
        """What the host of `rank` hands over to work that it queues."""
        host = self.hosts.get(rank)
        if host is None:
            return Clock()
        host.clock.prune(self.agents)
        clock = host.clock.copy()
        clock.learn(host.agent, host.clk)
        host.clk += 1
        return clock

    def host_access(
        self, rank: int, spans: Iterable[Any], is_write: bool, place: Place | None = None
    ) -> None:
        """A torch operation of `rank` reads or writes strided spans of memory.

        A span is (address, shape, strides in bytes, numpy dtype); untracked ones are passed over.
        """
        if not self.checks:
            return
        Actor.of_host(self, self.hosts[rank], place or user_place()).access(spans, is_write)

    def heap_of(self, table: int) -> HeapView:
        """The symmetric heap that the world table at address `table` describes."""
        heap = self.heaps.get(table)
        if heap is None:
            raise RuntimeError(f"no world has its table at {table:#x}")
        return heap

    def node_of(self, rank: int) -> int:
        return self._nodes[rank]

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def next_number(self, rank: int) -> int:
        """The number of the next work of `rank`, from 1 on."""
        self._numbers[rank] += 1
        return self._numbers[rank]

    # ------------------------------------------------------------------------------------------
    # The scheduler

    def run(self) -> Report:
        """Run until every host has ended and every stream is empty, or nobody can go on."""
        self.hub, before = getcurrent(), self.steps
        try:
            # A tile is too small to share out: BLAS threads would only get in each other's way.
            with running(self), _blas().limit(limits=1, user_api="blas"), _little_garbage():
                self._run()
        finally:
            self._end_hosts()
            self.rewrite.steps += self.steps - before
        return self.report

    def _run(self) -> None:
        idle_rounds, progress = 0, -1
        self._room, self._crowding = self.num_sms, []
        pick, most_steps = self.chooser.pick, self.rewrite.most_steps
        while True:
            ready = self._ready
            while ready:
                place = pick(ready)
                if place < 0:
                    break
                task = ready[place]
                ready[place] = ready[-1]
                ready.pop()
                self.running = task
                self.steps += 1
                if self.steps > most_steps:
                    raise NoEnd(f"no end after {self.steps} steps")
                task.step()
                if self.findings.enough:
                    return
                if self.hosts_may_go:
                    self._wake_hosts()
            if self._finished():
                self._end()
                break
            # Spins that were set aside may have been waiting for something else than the word
            # that they looked at last: let all of them look again.
            if ready:
                self._try_blocked()
            idle_rounds = idle_rounds + 1 if self.progress == progress else 1
            progress = self.progress
            if idle_rounds > IDLE_ROUNDS or not self._wake_spins():
                if self._let_hosts_go_on():
                    continue
                if self._deadlocked():
                    continue
                break

    def _try_blocked(self) -> None:
        """Nobody in an explored machine would get on: let the waits be seen to wait."""
        blocked = [task for task in self._ready if isinstance(task, Program)]
        self._ready[:] = [task for task in self._ready if not isinstance(task, Program)]
        for program in blocked:
            program.step()

    def _end(self) -> None:
        """Everybody has ended: what was wrong on the way, seen from here?"""
        if self._crowding:
            self._file(with_room(self._crowding, self._room))
        if self.ledger is not None and not any(host.error for host in self.hosts.values()):
            self.ledger.close()

    def _deadlocked(self) -> bool:
        """Nobody can go on. Where programs found no room, find out with how much they would."""
        stuck, unstarted = self._stuck(), self._unstarted()
        if not self._crowding:
            for watch in self.watches:
                for one in [*stuck, *(host for host in self.hosts.values() if not host.ended)]:
                    watch.stuck(one)
        if unstarted and not self.explores and not self.findings.failed:
            self._crowding = self._crowding or deadlock(self, stuck, unstarted)
            self._room += 1
            for rank in range(self.num_ranks):
                self._fill(rank)
            return True
        self._file(deadlock(self, stuck, unstarted))
        return False

    def _file(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.findings.find(finding)

    def _stuck(self) -> list[Program | TokenWork]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters]

    def _unstarted(self) -> list[KernelWork]:
        return [
            work for works in self._kernels.values() for work in works if work.next < work.total
        ]

    def _finished(self) -> bool:
        return all(host.ended for host in self.hosts.values()) and all(
            stream.idle for stream in self.all_streams.values()
        )

    def close(self) -> None:
        """End the programs that are left: of a suspended one nothing would ever be freed.

        Its frames hold the machine, and no garbage collector looks into a coroutine's frames.
        """
        for task in [*self._stuck(), *self._ready]:
            if isinstance(task, Program):
                task.coroutine.parent = getcurrent()
                task.coroutine.throw(GreenletExit)
        self._waiters.clear()
        self._ready.clear()

    def _end_hosts(self) -> None:
        for host in self.hosts.values():
            if not host.ended:
                host.abort()

    def enter_rank(self, rank: int) -> None:
        if rank != self._rank_in_front:
            self._rank_in_front = rank
            self.on_switch(rank)

    def _wake_hosts(self) -> None:
        self.hosts_may_go = False
        still = []
        for host in self.waiting_hosts:
            if host.condition is not None and host.condition():
                self._ready.append(host)
            else:
                still.append(host)
        self.waiting_hosts = still

    def _let_hosts_go_on(self) -> bool:
        """Nobody can go on, but a GPU's host would: let it queue what it would have run."""
        hosts = [host for host in self.waiting_hosts if host.may_go_on]
        for host in hosts:
            host.goes_on = True
            self._ready.append(host)
        self.waiting_hosts = [host for host in self.waiting_hosts if not host.may_go_on]
        self.progress += bool(hosts)
        return bool(hosts)

    def make_ready(self, task: Any) -> None:
        self._ready.append(task)

    def preempts(self) -> bool:
        """Is somebody else to be chosen now? Where nobody ever is, the scheduler sees the end."""
        self.steps += 1
        if self.explores or self.steps > self.rewrite.most_steps:
            return True
        return bool(self._ready) and self.chooser.preempts()

    def stream_changed(self, stream: Stream) -> None:
        """Let the stream's first work start, when its turn comes."""
        if stream.queue and stream.active is None and not stream.pending:
            stream.pending = True
            self._ready.append(_Activation(self, stream))

    def _activate(self, stream: Stream) -> None:
        stream.pending = False
        if not stream.queue or stream.active is not None:
            return
        if isinstance(stream.queue[0], KernelWork) and not self.explores:
            # A device starts kernels in the order in which its host launched them.
            rivals = [
                other
                for other in self.streams(stream.rank)
                if other.pending and other.queue and isinstance(other.queue[0], KernelWork)
            ]
            first = min([stream, *rivals], key=lambda s: s.queue[0].sequence)
            if first is not stream:
                first.pending = False
                self.stream_changed(stream)
                stream = first
        if stream.queue[0].eligible():
            stream.begin()

    def start_kernel(self, work: KernelWork) -> None:
        self.progress += 1
        if work.total == 0:
            work.stream.finished(work)
            return
        if work.cooperative and work.total > self.num_sms:
            self.findings.failure(
                None, ResidencyError, "residency",
                f"{work.describe()} is cooperative but has {work.total} programs; rank"
                f" {work.rank} holds {self.num_sms} at a time", work.place,
                f"launch at most {counted(self.num_sms, 'program')} and let each take several"
                " tiles",
                rank=work.rank, kernel=work.kernel.name,
            )  # fmt: skip
            work.stream.finished(work)
            return
        self._kernels[work.rank].append(work)
        self._fill(work.rank)

    def _fill(self, rank: int) -> None:
        """Start programs of the kernels that are on, in order, while the device has room."""
        for work in self._kernels[rank]:
            while work.next < work.total:
                if self._resident[rank] >= self._room:
                    return
                self._start_program(work, self._next_index(work))

    def _next_index(self, work: KernelWork) -> int:
        """Which program of `work` starts next: in order, unless an explored machine is full."""
        left = work.total - work.next
        if not self.explores or self._resident[work.rank] + left <= self.num_sms:
            return work.next if not work.out_of_order else work.out_of_order.pop(0)
        if not work.out_of_order:
            work.out_of_order.extend(range(work.next, work.total))
        return work.out_of_order.pop(self.chooser.choose(left, "the program that starts"))

    def _start_program(self, work: KernelWork, index: int) -> None:
        program = self._program_type(self, work, work.program_id(index))
        work.next += 1
        self._resident[work.rank] += 1
        for watch in self.watches:
            watch.gave((work, program.program))
        self._ready.append(program)

    def program_ended(self, program: Program) -> None:
        work = program.work
        for watch in self.watches:
            watch.ended(program)
        if self.time is not None:
            self.time.program_ended(program)
        self.progress += 1
        self._resident[work.rank] -= 1
        work.ended += 1
        if program.clock is not work.clock:
            work.stream.clock.join(program.clock)
        if work.ended == work.total:
            self._kernels[work.rank].remove(work)
            work.stream.finished(work)
        if self._kernels[work.rank]:
            self._fill(work.rank)

    def set_aside(self, program: Program) -> None:
        """Let others run until the word that `program` looks at changes."""
        waiting = program.waiting
        for watch in self.watches:
            watch.waits(program, waiting)
        waiting.allocation.sync_word(waiting.cell)
        self._waiters.setdefault((id(waiting.allocation), waiting.cell), []).append(program)
        self.hub.switch()

    def await_token(self, work: TokenWork, *, is_new: bool) -> None:
        """Let the stream of `work` look again when the word that it waits for changes."""
        waiting = work.waiting
        assert waiting is not None
        if is_new:
            for watch in self.watches:
                watch.waits(work, waiting)
        waiting.allocation.sync_word(waiting.cell)
        waiters = self._waiters.setdefault((id(waiting.allocation), waiting.cell), [])
        if work not in waiters:
            waiters.append(work)

    def word_changed(
        self, allocation: Allocation, cell: int, by: Program | None = None, loc: int = -1
    ) -> None:
        """A signal word has a new value: whoever waits for it looks again."""
        self.progress += 1
        if by is not None:
            self.signalled(allocation, cell, by.locations[loc])
        waiters = self._waiters.pop((id(allocation), cell), None)
        if waiters:
            self._wake(waiters)

    def _wake(self, waiters: Iterable[Program | TokenWork]) -> None:
        for waiter in waiters:
            if isinstance(waiter, TokenWork):
                self.stream_changed(waiter.stream)
            else:
                self._ready.append(waiter)

    def words_changed(
        self, allocation: Allocation, cells: list[int], by: Program, loc: int
    ) -> None:
        """The same for a tile of words; a large one is data, and nobody's signal."""
        self.progress += 1
        if len(cells) <= SIGNALS_IN_A_TILE:
            for cell in cells:
                self.word_changed(allocation, cell, by, loc)
        elif self._waiters:
            for cell in cells:
                self._wake(self._waiters.pop((id(allocation), cell), ()))

    def signalled(self, allocation: Allocation, cell: int, place: Place) -> None:
        """Remember who signals this word, for the report of a deadlock."""
        key = (allocation.name, cell)
        places = self.signallers.get(key)
        if places is None:
            places = self.signallers[key] = set()
        if len(places) < 4:
            places.add(place)

    def _wake_spins(self) -> bool:
        woken = False
        for key, programs in list(self._waiters.items()):
            spinning = [p for p in programs if p.waiting.expected is None]
            if spinning:
                woken = True
                rest = [p for p in programs if p.waiting.expected is not None]
                self._ready.extend(spinning)
                if rest:
                    self._waiters[key] = rest
                else:
                    del self._waiters[key]
        return woken

    # ------------------------------------------------------------------------------------------
    # Work that is no kernel

    def actor(self, work: Work, what: str) -> Actor:
        """Somebody to do `work`'s accesses, ordered behind its stream's earlier work."""
        return Actor.of_work(self, work, what)
