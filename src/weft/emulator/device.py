"""The emulated devices: each rank's streams, the work that queues on them, the symmetric heaps.

Work on one stream runs in order; nothing orders two streams but events. A stream's clock knows of
all work that it has ended, and hands that on to its next work.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.base.place import UNKNOWN, Place
from weft.base.topology import Topology
from weft.base.user_place import user_place
from weft.emulator.accesses import Checker
from weft.emulator.clocks import Clock, Identity
from weft.emulator.hosts import Hosts
from weft.emulator.scheduler import Scheduler, Waiters


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


class Work:
    """One entry of a stream. `place` is the line of the host code that queued it."""

    kind = "work"
    is_launch = False

    def __init__(self, place: Place = UNKNOWN, keep: Any = None) -> None:
        self.place = place
        self.keep = keep  # tensors that must live until it has run
        self.clock = Clock()
        self.sequence = 0
        self.position = 0
        self.number = 0  # of its rank's works, in the order in which the host queued them
        self.stream: Stream

    def eligible(self) -> bool:
        """May it start, being first in its stream?"""
        return True

    def start(self) -> None:
        """Run it, or set it going; ends with stream.finished(self)."""
        raise NotImplementedError

    def describe(self) -> str:
        return self.kind

    @property
    def rank(self) -> int:
        return self.stream.rank


class Stream:
    """A queue of work of one rank; `number` is unique in its machine."""

    def __init__(self, device: Device, rank: int, name: str, number: int) -> None:
        self.device = device
        self.rank = rank
        self.name = name
        self.number = number
        self.clock = Clock()
        self.queue: deque[Work] = deque()
        self.active: Work | None = None
        self.pending = False  # is its first work waiting for its turn to start?
        self.enqueued = 0
        self.done = 0

    @property
    def idle(self) -> bool:
        return not self.queue and self.active is None

    def enqueue(self, work: Work) -> Work:
        """Queue `work` behind all earlier work; it knows what the calling host knows.

        The session's rewrite may put it elsewhere among what has not begun, or leave it out.
        """
        if not work.place.frames:
            work.place = user_place()
        behind = self.device.position(work, self)
        if behind is None:
            return work
        self.admit(work)
        self.queue.insert(behind, work)
        if behind < len(self.queue) - 1:
            self._number_again(behind)
        for watch in self.device.checker.watches:
            watch.queued(work)
        self.changed()
        return work

    def admit(self, work: Work) -> None:
        """Make `work` this stream's last: its numbers, and what its rank's host knows."""
        self.enqueued += 1
        work.stream = self
        work.position = self.enqueued
        self.device.number(work)
        work.clock = self.device.hosts.publish(self.rank)

    def _number_again(self, first: int) -> None:
        """Works from `first` on have been put into another order than they were queued in."""
        works = list(self.queue)[first:]
        positions = sorted(work.position for work in works)
        for work, position in zip(works, positions, strict=True):
            work.position = position

    def changed(self) -> None:
        """Let the first work start, when its turn comes."""
        if self.queue and self.active is None and not self.pending:
            self.pending = True
            self.device.scheduler.make_ready(_Activation(self))

    def activate(self) -> None:
        """Start the first work of the queue, if it may: its turn has come."""
        self.pending = False
        if not self.queue or self.active is not None:
            return
        stream = self
        if self.queue[0].is_launch and not self.device.scheduler.explores:
            # A device starts kernels in the order in which its host launched them.
            rivals = [
                other
                for other in self.device.streams(self.rank)
                if other.pending and other.queue and other.queue[0].is_launch
            ]
            stream = min([self, *rivals], key=lambda s: s.queue[0].sequence)
            if stream is not self:
                stream.pending = False
                self.changed()
        if stream.queue[0].eligible():
            work = stream.queue.popleft()
            stream.begin(work)
            work.start()

    def begin(self, work: Work) -> None:
        """`work` begins, behind all that this stream has done."""
        self.active = work
        self.clock.join(work.clock)
        self.clock.prune(self.device.checker.agents)
        work.clock = self.clock.copy()
        for watch in self.device.checker.watches:
            watch.began(work)

    def finished(self, work: Work) -> None:
        """All of `work` has ended: whatever follows in this stream is ordered behind it."""
        for watch in self.device.checker.watches:
            watch.ended(work)
        self.active = None
        self.done = work.position
        self.clock.streams[self.number] = work.position
        self.device.scheduler.host_changed()
        self.changed()

    def identity(self, what: str) -> Identity:
        """How a report names its work."""
        return Identity(self.rank, f"{what} (stream {self.name})")


class _Activation:
    """The scheduler's choice to start the next work of one rank's streams."""

    __slots__ = ("stream",)
    blocked = None

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    @property
    def rank(self) -> int:
        return self.stream.rank

    def step(self) -> None:
        self.stream.activate()


class Device:
    """The devices of all ranks, on each of which `num_sms` programs are resident at a time.

    `position(work, stream)` says where in its queue a work goes, or that it is left out (None).
    """

    def __init__(
        self, topology: Topology, num_sms: int, checker: Checker, scheduler: Scheduler,
        waiters: Waiters, hosts: Hosts, position: Callable[[Work, Stream], int | None],
        arch: int = 0,
    ) -> None:  # fmt: skip
        self.num_ranks = topology.num_ranks
        self.num_nodes = topology.num_nodes
        self.num_sms = num_sms
        self.arch = arch
        self.checker = checker
        self.scheduler = scheduler
        self.waiters = waiters
        self.hosts = hosts
        self.position = position
        self.start_kernel: Callable[[Any], None]  # set by who has the room for its programs
        self.heaps: dict[int, HeapView] = {}
        self._heap_ranges: list[tuple[range, weakref.ref]] = []
        self.barriers: dict[Any, list[Work]] = {}
        self.all_streams: dict[tuple[int, str], Stream] = {}
        self._nodes = [topology.seat(rank).node for rank in range(self.num_ranks)]
        self._sequence = 0
        self._numbers: Counter[int] = Counter()

    def stream(self, rank: int, name: str = "main") -> Stream:
        """The stream `name` of `rank`, made on first use."""
        stream = self.all_streams.get((rank, name))
        if stream is None:
            stream = Stream(self, rank, name, len(self.all_streams))
            self.all_streams[(rank, name)] = stream
        return stream

    def streams(self, rank: int) -> list[Stream]:
        return [stream for (owner, _), stream in self.all_streams.items() if owner == rank]

    @property
    def idle(self) -> bool:
        return all(stream.idle for stream in self.all_streams.values())

    def number(self, work: Work) -> None:
        """Give `work` the next number of all works, and of its rank's, from 1 on."""
        self._sequence += 1
        work.sequence = self._sequence
        self._numbers[work.rank] += 1
        work.number = self._numbers[work.rank]

    def heap_of(self, table: int) -> HeapView:
        """The symmetric heap that the world table at address `table` describes."""
        heap = self.heaps.get(table)
        if heap is None:
            raise RuntimeError(f"no world has its table at {table:#x}")
        return heap

    def add_heap(self, addresses: range, owner: Any) -> None:
        """A rank's symmetric heap, as long as `owner` lives: torch may get its memory then."""
        self._heap_ranges = [one for one in self._heap_ranges if one[1]() is not None]
        self._heap_ranges.append((addresses, weakref.ref(owner)))

    def on_heap(self, address: int) -> bool:
        """Is `address` on some rank's symmetric heap, allocated or not?"""
        return any(address in some and owner() is not None for some, owner in self._heap_ranges)

    def node_of(self, rank: int) -> int:
        return self._nodes[rank]
