"""The emulated machine: ranks with memory and streams, and the scheduler that runs them all.

Exactly one thing runs at a time: a host (a thread per rank), a program (a coroutine), a copy.
Who is next is drawn from a seeded generator, so a seed is a schedule and a schedule can be run
again. Host code runs until it waits; device code until it synchronises. Nothing ever just hangs:
when nobody can go on, the machine says who waits for what.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from greenlet import getcurrent
from threadpoolctl import ThreadpoolController

from weft.base.errors import (
    DeadlockError,
    FindingError,
    OutOfBoundsError,
    RaceError,
    ResidencyError,
    SignalError,
    UninitializedError,
)
from weft.base.place import UNKNOWN, Place
from weft.base.report import Finding, Report, Side
from weft.emulator.actors import Actor
from weft.emulator.clocks import Agents, Clock, Identity
from weft.emulator.isolation import place_on_node
from weft.emulator.memory import Allocation, Memory
from weft.emulator.programs import Program
from weft.emulator.shadow import Shadow
from weft.emulator.streams import KernelWork, Stream, Work
from weft.emulator.user_place import user_place

# How often a program lets another one go first at a synchronising operation.
PREEMPTION = 0.3

# So often may every spinning program look again, with nothing having changed, before it is stuck.
IDLE_ROUNDS = 3

# Findings of one kind and pair of lines are told once; this many different ones are kept.
MAX_FINDINGS = 64

_ERRORS: dict[str, type[Exception]] = {
    "race": RaceError,
    "deadlock": DeadlockError,
    "residency": ResidencyError,
    "out of bounds": OutOfBoundsError,
    "uninitialised": UninitializedError,
    "signal": SignalError,
}


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
        self.segments: dict[Place, int] = {}
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"weft-rank{rank}", daemon=True)
        self._started = False

    def _run(self) -> None:
        self._go.acquire()
        _THREAD.host = self
        try:
            if not self.aborted:
                self.result = self.main()
        except _Aborted:
            pass
        except BaseException as error:  # the session decides what to do with it
            self.error = error
        self.ended = True
        self.machine.progress += 1
        self.machine.hosts_may_go = True
        self.machine._baton.release()

    def step(self) -> None:
        """Called by the scheduler: lets the thread run until it waits or ends."""
        self.machine._enter_rank(self.rank)
        self.condition = None
        if not self._started:
            self._started = True
            self._thread.start()
        self._go.release()
        self.machine._baton.acquire()
        self.machine.hosts_may_go = True

    def wait(
        self, condition: Callable[[], bool], why: object, place: Place, may_go_on: bool
    ) -> bool:
        """Called by the thread: gives the baton back until `condition()` holds.

        Says whether it does: where nobody else can go on, one that `may_go_on` need not wait.
        """
        if self.aborted:  # a `finally` of code that is being unwound waits for nobody
            raise _Aborted
        self.condition = condition
        self.why = why
        self.place = place
        self.may_go_on = may_go_on
        self.goes_on = False
        self.machine.waiting_hosts.append(self)
        self.machine._baton.release()
        self._go.acquire()
        if self.aborted:
            raise _Aborted
        return not self.goes_on

    def abort(self) -> None:
        """End a thread that waits for something that will not come."""
        self.aborted = True
        if not self.ended:
            self.step()


class _Aborted(BaseException):
    """Unwinds the host code of a run that was given up."""


class _Activation:
    """The scheduler's choice to start the next work of one rank's streams."""

    __slots__ = ("machine", "stream")

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self.machine = machine
        self.stream = stream

    def step(self) -> None:
        self.machine._activate(self.stream)


_THREAD = threading.local()


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


class Machine:
    """An emulated machine of `num_ranks` devices on `num_nodes` hosts.

    `num_sms` programs can be resident on one rank at a time. `checks` turns the race,
    initialisation and bounds checks on.
    """

    def __init__(
        self, num_ranks: int, *, num_nodes: int = 1, seed: int = 0, num_sms: int = 132,
        checks: bool = True, name: str = "program",
    ) -> None:  # fmt: skip
        self.num_ranks = num_ranks
        self.num_nodes = num_nodes
        self.seed = seed
        self.num_sms = num_sms
        self.checks = checks
        self.memory = Memory()
        self.agents = Agents()
        self.shadow = Shadow(self.agents)
        self.report = Report(name, num_ranks)
        self.error: FindingError | None = None
        self.heaps: dict[int, HeapView] = {}
        self.barriers: dict[Any, list[Work]] = {}
        self.hosts: dict[int, HostTask] = {}
        self.waiting_hosts: list[HostTask] = []
        self.hosts_may_go = False
        self.on_switch: Callable[[int], None] = lambda rank: None
        self.progress = 0
        self.hub = getcurrent()
        self._streams: dict[tuple[int, str], Stream] = {}
        self._random = random.Random(seed)
        self._ready: list[Any] = []
        self._waiters: dict[tuple[int, int], list[Program]] = {}
        self._resident: Counter[int] = Counter()
        self._kernels: dict[int, list[KernelWork]] = {rank: [] for rank in range(num_ranks)}
        self._signallers: dict[tuple[Any, int], set[Place]] = {}
        self._sequence = 0
        self._rank_in_front = -1
        self._baton = threading.Semaphore(0)
        self._fatal = False

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
        host = getattr(_THREAD, "host", None)
        if host is None or host.machine is not self:
            raise RuntimeError("this is for the host code of an emulated rank")
        return host

    def stream(self, rank: int, name: str = "main") -> Stream:
        """The stream `name` of `rank`, made on first use."""
        stream = self._streams.get((rank, name))
        if stream is None:
            stream = Stream(self, rank, name, len(self._streams))
            self._streams[(rank, name)] = stream
        return stream

    def streams(self, rank: int) -> list[Stream]:
        return [stream for (owner, _), stream in self._streams.items() if owner == rank]

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

    def host_drain(self, rank: int, stream_name: str = "main") -> None:
        """Wait until all that `stream_name` has queued is done, and know of it."""
        stream = self.stream(rank, stream_name)
        if not stream.idle:
            target = stream.enqueued
            self.host_wait(
                lambda: stream.done >= target,
                f"the work queued on stream {stream_name} (on a GPU the host would go on here;"
                " the emulator runs torch operations on the host)",
            )
        self.hosts[rank].clock.join(stream.clock)

    def join_hosts(self, ranks: Iterable[int]) -> None:
        """The hosts of `ranks` have met: each knows what all know."""
        ranks = list(ranks)
        clock = Clock()
        for rank in ranks:
            clock.join(self.host_publish(rank))
        for rank in ranks:
            self.hosts[rank].clock.join(clock)

    def host_publish(self, rank: int) -> Clock:
        """What the host of `rank` hands over to work that it queues."""
        host = self.hosts.get(rank)
        if host is None:
            return Clock()
        host.clock.prune(self.agents)
        clock = host.clock.copy()
        clock.agents[host.agent] = host.clk
        host.clk += 1
        host.segments.clear()
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
        return place_on_node(rank, self.num_ranks, self.num_nodes)[0]

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # ------------------------------------------------------------------------------------------
    # The scheduler

    def run(self) -> Report:
        """Run until every host has ended and every stream is empty, or nobody can go on."""
        self.hub = getcurrent()
        try:
            # A tile is too small to share out: BLAS threads would only get in each other's way.
            with _blas().limit(limits=1, user_api="blas"):
                self._run()
        finally:
            self._end_hosts()
        return self.report

    def _run(self) -> None:
        idle_rounds, progress = 0, -1
        draw = self._random.random
        while True:
            ready = self._ready
            while ready and not self._fatal:
                place = int(draw() * len(ready))
                task = ready[place]
                ready[place] = ready[-1]
                ready.pop()
                task.step()
                if self.hosts_may_go:
                    self._wake_hosts()
            if self._fatal or self._finished():
                break
            # Spins that were set aside may have been waiting for something else than the word
            # that they looked at last: let all of them look again.
            idle_rounds = idle_rounds + 1 if self.progress == progress else 1
            progress = self.progress
            if idle_rounds > IDLE_ROUNDS or not self._wake_spins():
                if self._let_hosts_go_on():
                    continue
                self._report_stuck()
                break

    def _finished(self) -> bool:
        return all(host.ended for host in self.hosts.values()) and all(
            stream.idle for stream in self._streams.values()
        )

    def _end_hosts(self) -> None:
        for host in self.hosts.values():
            if not host.ended:
                host.abort()

    def _enter_rank(self, rank: int) -> None:
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
        return bool(self._ready) and self._random.random() < PREEMPTION

    def stream_changed(self, stream: Stream) -> None:
        """Let the stream's first work start, when its turn comes."""
        if stream.queue and stream.active is None and not stream.pending:
            stream.pending = True
            self._ready.append(_Activation(self, stream))

    def _activate(self, stream: Stream) -> None:
        stream.pending = False
        if not stream.queue or stream.active is not None:
            return
        if isinstance(stream.queue[0], KernelWork):
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
            self.report_failure(
                None, ResidencyError, "residency",
                f"{work.describe()} is cooperative but has {work.total} programs; rank"
                f" {work.rank} holds {self.num_sms} at a time", work.place,
                f"launch at most {self.num_sms} programs and let each take several tiles",
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
                if self._resident[rank] >= self.num_sms:
                    return
                program = Program(self, work, work.program_id(work.next))
                work.next += 1
                self._resident[rank] += 1
                self._ready.append(program)

    def program_ended(self, program: Program) -> None:
        work = program.work
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
        waiting.allocation.sync_word(waiting.cell)
        self._waiters.setdefault((id(waiting.allocation), waiting.cell), []).append(program)
        self.hub.switch()

    def word_changed(
        self, allocation: Allocation, cell: int, by: Program | None = None, loc: int = -1
    ) -> None:
        """A signal word has a new value: whoever waits for it looks again."""
        self.progress += 1
        if by is not None:
            self.signalled(allocation, cell, by.locations[loc])
        waiters = self._waiters.pop((id(allocation), cell), None)
        if waiters:
            self._ready.extend(waiters)

    def signalled(self, allocation: Allocation, cell: int, place: Place) -> None:
        """Remember who signals this word, for the report of a deadlock."""
        key = (allocation.name, cell)
        places = self._signallers.get(key)
        if places is None:
            places = self._signallers[key] = set()
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

    # ------------------------------------------------------------------------------------------
    # Findings

    def find(self, finding: Finding, error: type[Exception] | None = None) -> None:
        """File a finding; the first one decides which error the session raises."""
        if len(self.report.findings) >= MAX_FINDINGS or not self.report.add(finding):
            return
        if self.error is None:
            kind = error or _ERRORS[finding.kind]
            place = finding.first.place
            if issubclass(kind, FindingError):
                self.error = kind(str(finding), finding=finding)
            else:
                self.error = kind(str(finding))
                self.error.finding = finding  # type: ignore[attr-defined]
            del place

    def side(self, program: Any, place: Place, **fields: Any) -> Side:
        """The side of a finding that `program` (or an actor, or nobody) takes."""
        if program is None:
            return Side.at(place, **fields)
        identity = self.agents.identity[program.agent]
        who = {"rank": identity.rank, "kernel": identity.kernel, "program": identity.program}
        return Side.at(place, **{**who, **fields})

    def report_race(
        self, by: Any, allocation: Allocation, cell: int, what: str, kind: str, earlier: int,
        place: Place,
    ) -> None:  # fmt: skip
        """Two accesses that nothing orders; `kind` says what the earlier one, a segment, was."""
        index = allocation.index(
            allocation.address + cell * allocation.cell_bytes, allocation.cell_bytes
        )
        agents = self.agents
        identity = agents.identity[agents.segment_agent[earlier]]
        tensor = _tensor_name(allocation)
        if kind == "scope":
            message = (
                f"{tensor}[{_index_text(index)}] is updated atomically by two ranks, but a scope"
                " does not include both"
            )
            remedy = 'give both atomics scope=SYSTEM (sem scope "sys" in tl.atomic_*)'
            first_note, second_note = "updates atomically", "updated atomically"
        else:
            message = (
                f"nothing orders this {what} of {tensor}[{_index_text(index)}] after the {kind}"
            )
            remedy = (
                "signal (release) after the first access and wait for it (acquire) before the"
                " second, both with a scope that covers the two"
            )
            first_note = {"read": "reads", "write": "writes"}.get(what, "accesses atomically")
            second_note = {"read": "read", "write": "wrote"}.get(kind, "accessed atomically")
        finding = Finding(
            "race", message,
            self.side(by, place, tensor=tensor, index=index, note=first_note),
            Side.at(
                agents.segment_place[earlier], rank=identity.rank, kernel=identity.kernel,
                program=identity.program, tensor=tensor, index=index, note=second_note,
            ),
            remedy,
        )  # fmt: skip
        self.find(finding)

    def report_uninitialised(
        self, by: Any, allocation: Allocation, cell: int, place: Place
    ) -> None:
        tensor = _tensor_name(allocation)
        index = allocation.index(
            allocation.address + cell * allocation.cell_bytes, allocation.cell_bytes
        )
        self.find(
            Finding(
                "uninitialised",
                f"{tensor}[{_index_text(index)}] is read, but nothing has written it",
                self.side(by, place, tensor=tensor, index=index, note="reads"),
                remedy="write it first, or wait for the rank that does",
            )
        )

    def report_out_of_bounds(
        self, by: Any, near: Allocation | None, address: int, itemsize: int, what: str, loc: Any
    ) -> None:
        place = loc if isinstance(loc, Place) else by.locations[loc]
        if near is None:
            message, fields = f"{what} address {address:#x}, which belongs to no tensor", {}
        else:
            tensor = _tensor_name(near)
            elements = near.nbytes // itemsize
            flat = (address - near.address) // itemsize
            shape = f", shape {list(near.shape)}" if near.shape else ""
            message = (
                f"{what} element {flat} of {tensor} of rank {near.rank}, which has {elements}"
                f" elements{shape}"
            )
            fields = {"tensor": tensor, "index": flat}
        self.find(
            Finding(
                "out of bounds", message, self.side(by, place, note=what, **fields),
                remedy="mask the access, or check sizes and strides",
            )
        )  # fmt: skip

    def report_plain_spin(self, by: Program, allocation: Allocation, index: int, loc: int) -> None:
        tensor = _tensor_name(allocation)
        self.find(
            Finding(
                "signal",
                f"a loop waits for {tensor}[{index}] with plain loads: a compiler may read the"
                " word once, and nothing read afterwards is ordered",
                self.side(by, by.locations[loc], tensor=tensor, index=index, note="spins on"),
                remedy="wait with wl.wait, or poll with an acquire atomic",
            ),
            SignalError,
        )

    def check_set(self, by: Program, allocation: Allocation, index, kind, value, loc: int) -> None:
        """A SET that takes a signal word backwards loses a signal for whoever counts on it."""
        seen = allocation.view(kind)[index]
        if seen > value and int(seen) - int(value) < 1 << (kind.itemsize * 8 - 1):
            tensor = _tensor_name(allocation)
            if not (value == 0 or seen == kind.type(1)):
                self.find(
                    Finding(
                        "signal",
                        f"{tensor}[{index}] is set from {seen} back to {value}: an epoch did not"
                        " advance",
                        self.side(by, by.locations[loc], tensor=tensor, index=index, note="sets"),
                        remedy="signal words only grow; derive the value from the slot's epoch",
                    ),
                    SignalError,
                )

    def report_failure(
        self, by: Any, error: type[Exception], kind: str, message: str, place: Place, remedy: str,
        **fields: Any,
    ) -> None:  # fmt: skip
        """Something after which a program cannot go on."""
        self._failed = True
        self.find(Finding(kind, message, self.side(by, place, **fields), remedy=remedy), error)

    _failed = False

    def _report_stuck(self) -> None:
        """Nobody can go on: say who waits for what."""
        stuck = [program for programs in self._waiters.values() for program in programs]
        if self._failed or any(host.error for host in self.hosts.values()):
            return  # what ended before its time is the cause, and is reported already
        groups: dict[Any, list[Program]] = {}
        for program in stuck:
            waiting = program.waiting
            key = (waiting.place, waiting.allocation.name, program.work.kernel.name)
            groups.setdefault(key, []).append(program)
        unstarted = [
            work for works in self._kernels.values() for work in works if work.next < work.total
        ]
        table = [self._waiting_line(programs) for programs in groups.values()]
        hosts: dict[Any, list[int]] = {}
        for host in self.hosts.values():
            if not host.ended:
                hosts.setdefault((host.why, host.place), []).append(host.rank)
        for (why, place), ranks in hosts.items():
            who = f"the host of {_ranks_text(ranks)}"
            table.append(f"{who} waits for {why}\n      at {_deep(place)}")
        for key, arrived in self.barriers.items():
            ranks = sorted(work.rank for work in arrived)
            table.append(f"barrier {key}: only ranks {ranks} of {arrived[0].parties} have arrived")
        for stream in self._streams.values():
            if stream.queue:
                first = stream.queue[0].describe()
                table.append(
                    f"rank {stream.rank} stream {stream.name}: {len(stream.queue)} works behind,"
                    f" first {first}"
                )
        kind, remedy = "deadlock", "see who could have signalled, above"
        message = "every program that is left waits:"
        if unstarted and stuck:
            kind = "residency"
            works = "; ".join(
                f"{w.describe()} on rank {w.rank}: {w.total - w.next} of {w.total} programs have"
                " not started"
                for w in unstarted
            )
            message = (
                f"{works}: rank holds {self.num_sms} programs at a time, and those that run wait"
                " for those that cannot start:"
            )
            remedy = (
                f"launch at most {self.num_sms} programs that wait for each other, or launch the"
                " one they wait for first"
            )
        text = message + "".join(f"\n    {line}" for line in table)
        if not groups:
            host = next(host for host in self.hosts.values() if not host.ended)
            first = Side.at(host.place, rank=host.rank, kernel="host", note=f"waits for {host.why}")
            self.find(Finding(kind, text, first, remedy=remedy))
            return
        for programs in groups.values():
            self.find(Finding(kind, text, self._waiting_side(programs[0]), remedy=remedy))
            # One table is enough: the others are told by their places.
            text, remedy = "the same standstill, at another line", ""

    def _waiting_side(self, program: Program) -> Side:
        waiting = program.waiting
        want = "a change of" if waiting.expected is None else f"at least {waiting.expected} in"
        return self.side(
            program, waiting.place, tensor=_tensor_name(waiting.allocation), index=waiting.index,
            note=f"sees {waiting.seen}, waits for {want}",
        )  # fmt: skip

    def _waiting_line(self, programs: list[Program]) -> str:
        program = programs[0]
        waiting = program.waiting
        tensor = _tensor_name(waiting.allocation)
        now = self._word_now(waiting)
        expects = "another value" if waiting.expected is None else f">= {waiting.expected}"
        line = (
            f"rank {program.rank} {program.work.kernel.name}{program.program} waits for"
            f" {tensor}[{_index_text(waiting.index)}] {expects}, which is {now}\n"
            f"      at {_deep(waiting.place)}"
        )
        if len(programs) > 1:
            ranks = sorted({other.rank for other in programs})
            line += (
                f"\n      {len(programs)} programs wait at this line, on {_ranks_text(ranks)}, each"
                " for its own word or the same"
            )
        places = self._signallers.get((waiting.allocation.name, waiting.cell))
        others = {
            place
            for (name, _), known in self._signallers.items()
            if name == waiting.allocation.name
            for place in known
        }
        if places:
            line += "\n      signalled so far by " + "; ".join(sorted(_short(p) for p in places))
        elif others:
            line += "\n      never signalled; other words of it by " + "; ".join(
                sorted(_short(p) for p in others)
            )
        else:
            line += "\n      nobody has signalled any word of it"
        return line

    def _word_now(self, waiting: Any) -> int:
        allocation = waiting.allocation
        dtype = {1: "i1", 2: "i2", 4: "i4", 8: "i8"}[allocation.cell_bytes]
        import numpy as np

        return int(allocation.view(np.dtype(dtype))[waiting.cell])


def _short(place: Place) -> str:
    frame = place.outermost
    return "an unknown place" if frame is None else f"{frame.file}:{frame.line}"


def _deep(place: Place) -> str:
    """The place as text, its chain of calls set in as far as a line of the table is."""
    return str(place).replace("\n", "\n    ")


def _ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _tensor_name(allocation: Allocation) -> str:
    return f"{allocation.name}@rank{allocation.rank}"


def _index_text(index: Any) -> str:
    return ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)
