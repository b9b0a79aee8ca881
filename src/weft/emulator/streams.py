"""Streams of an emulated rank, and the kinds of work that queue on them.

Work on one stream runs in order; nothing orders two streams but events. A stream's clock knows of
all work that it has ended, and hands that on to its next work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.base.place import UNKNOWN, Place
from weft.base.user_place import user_place
from weft.emulator.clocks import Clock, Identity
from weft.emulator.protocols import Waiting
from weft.emulator.words import WORD

if TYPE_CHECKING:
    from weft.emulator.machine import Machine
    from weft.emulator.memory import Allocation


class Event:
    """A point in a stream; `clock` is what is known to whoever waits for it."""

    def __init__(self) -> None:
        self.done = False
        self.clock = Clock()
        # In simulated time: when it was recorded, and by whom.
        self.us, self.by = 0.0, None
        self.waiters: list[Stream] = []


class Work:
    """One entry of a stream. `place` is the line of the host code that queued it."""

    kind = "work"
    # In simulated time; what a torch operation costs is known once it has run.
    queued_us = begin_us = end_us = 0.0
    nbytes = flops = 0
    operand_bytes = 4

    def __init__(self, place: Place = UNKNOWN) -> None:
        self.place = place
        self.clock = Clock()
        self.sequence = 0
        self.position = 0
        self.number = 0  # of its rank's works, in the order in which the host queued them
        self.stream: Stream

    def eligible(self) -> bool:
        """May it start, being first in its stream?"""
        return True

    def start(self, machine: Machine) -> None:
        """Run it, or set it going; ends with stream.finished(self)."""
        raise NotImplementedError

    def describe(self) -> str:
        return self.kind

    @property
    def rank(self) -> int:
        return self.stream.rank


class KernelWork(Work):
    """A launch: `kernel` from the front end, `args` as its function takes them."""

    kind = "kernel"

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], args: Sequence[Any], *,
        cooperative: bool = False, place: Place = UNKNOWN, keep: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(place)
        self.kernel = kernel
        self.grid = grid
        self.grid_values = tuple(np.int32(n) for n in grid)
        self.args = tuple(args)
        self.cooperative = cooperative
        self.keep = keep  # tensors that must outlive the launch
        self.total = grid[0] * grid[1] * grid[2]
        self.next = 0
        self.out_of_order: list[int] = []  # those to start, where a choice was taken
        self.ended = 0
        self.end_clock: Clock | None = None
        # (first address, last, bytes in all) by allocation and direction, in simulated time.
        self.touched: dict[tuple[Allocation, bool], tuple[int, int, int]] = {}

    def program_id(self, index: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        return index % x, index // x % y, index // (x * y)

    def start(self, machine: Machine) -> None:
        machine.start_kernel(self)

    def describe(self) -> str:
        return f"kernel {self.kernel.name}{list(self.grid)}"


class CopyWork(Work):
    """A copy engine's transfer between two strided views of equal shape and itemsize.

    `dst` and `src` are (address, shape, strides in bytes, numpy dtype).
    """

    kind = "copy"

    def __init__(self, dst: Any, src: Any, *, place: Place = UNKNOWN, keep: Any = None) -> None:
        super().__init__(place)
        self.dst = dst
        self.src = src
        self.keep = keep

    def start(self, machine: Machine) -> None:
        actor = machine.actor(self, "copy engine")
        actor.copy(self.dst, self.src)
        self.stream.finished(self)


class WordCopyWork(Work):
    """The copy engine's signal: an 8-byte word behind all earlier work of its stream."""

    kind = "word copy"

    def __init__(self, dst: int, src: int, *, place: Place = UNKNOWN, keep: Any = None) -> None:
        super().__init__(place)
        self.dst = dst
        self.src = src
        self.keep = keep
        self.change = 0  # what a rewrite adds to the word

    def start(self, machine: Machine) -> None:
        actor = machine.actor(self, "copy engine")
        word = actor.read_word(self.src)
        if machine.time is not None:
            self.before = machine.time.word_at(self.dst)
        actor.write_word(self.dst, word + self.change)
        self.stream.finished(self)


class TokenWork(Work):
    """A stream's wait for a word that a kernel sets to 1, which is 0 again when it has ended.

    While it waits it is among the machine's waiters, like a program that is set aside.
    """

    kind = "token"

    def __init__(self, word: int, *, place: Place = UNKNOWN, keep: Any = None) -> None:
        super().__init__(place)
        self.word = word
        self.keep = keep
        self.waiting: Waiting | None = None

    def eligible(self) -> bool:
        machine = self.stream.machine
        allocation = machine.memory.find(self.word)
        if allocation is None:
            return True  # its access is a finding
        seen = int(allocation.view(WORD)[(self.word - allocation.address) // WORD.itemsize])
        if seen == 1:
            return True
        cell = (self.word - allocation.address) // allocation.cell_bytes
        index = allocation.index(self.word, WORD.itemsize)
        is_new = self.waiting is None
        self.waiting = Waiting(allocation, cell, index, self.place, 1, seen)
        machine.await_token(self, is_new=is_new)
        return False

    def start(self, machine: Machine) -> None:
        actor = machine.actor(self, "token")
        actor.take_word(self.word)
        self.stream.clock.join(actor.clock)
        self.stream.finished(self)

    def describe(self) -> str:
        allocation = self.stream.machine.memory.find(self.word)
        name = "" if allocation is None else f" {allocation.word_name(self.word, WORD.itemsize)}"
        return f"token{name}"


class EventRecord(Work):
    kind = "event record"

    def __init__(self, event: Event, *, place: Place = UNKNOWN) -> None:
        super().__init__(place)
        self.event = event

    def start(self, machine: Machine) -> None:
        self.event.clock.join(self.stream.clock)
        self.event.done = True
        self.stream.finished(self)
        for stream in self.event.waiters:
            machine.stream_changed(stream)


class EventWait(Work):
    kind = "event wait"

    def __init__(self, event: Event, *, place: Place = UNKNOWN) -> None:
        super().__init__(place)
        self.event = event

    def eligible(self) -> bool:
        if not self.event.done and self.stream not in self.event.waiters:
            self.event.waiters.append(self.stream)
        return self.event.done

    def start(self, machine: Machine) -> None:
        self.stream.clock.join(self.event.clock)
        self.stream.finished(self)


class HostCallWork(Work):
    """A host function in stream order, e.g. a recorded torch operation. It must not block."""

    kind = "host call"

    def __init__(self, call: Callable[[], None], *, place: Place = UNKNOWN, keep: Any = None):
        super().__init__(place)
        self.call = call
        self.keep = keep

    def start(self, machine: Machine) -> None:
        self.call()
        self.stream.finished(self)


class BarrierWork(Work):
    """A barrier over streams of several ranks: all that name `key` end together."""

    kind = "barrier"

    def __init__(self, key: Any, parties: int, *, place: Place = UNKNOWN) -> None:
        super().__init__(place)
        self.key = key
        self.parties = parties

    def start(self, machine: Machine) -> None:
        arrived = machine.barriers.setdefault(self.key, [])
        arrived.append(self)
        if len(arrived) < self.parties:
            return
        del machine.barriers[self.key]
        clock = Clock()
        for work in arrived:
            clock.join(work.stream.clock)
            clock.streams[work.stream.number] = work.position
        for work in arrived:
            work.stream.clock.join(clock)
            work.stream.finished(work)

    def describe(self) -> str:
        return f"barrier of {self.parties} ranks"


class Stream:
    """A queue of work of one rank; `number` is unique in its machine."""

    def __init__(self, machine: Machine, rank: int, name: str, number: int) -> None:
        self.machine = machine
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
        machine = self.machine
        if not work.place.frames:
            work.place = user_place()
        behind = machine.rewrite.position(work, self)
        if behind is None:
            return work
        self.enqueued += 1
        work.stream = self
        work.position = self.enqueued
        work.sequence = machine.next_sequence()
        work.number = machine.next_number(self.rank)
        work.clock = machine.host_publish(self.rank)
        if machine.time is not None:
            machine.time.queued(work)
        self.queue.insert(behind, work)
        if behind < len(self.queue) - 1:
            self._number_again(behind)
        for watch in machine.watches:
            watch.queued(work)
        machine.stream_changed(self)
        return work

    def _number_again(self, first: int) -> None:
        """Works from `first` on have been put into another order than they were queued in."""
        works = list(self.queue)[first:]
        positions = sorted(work.position for work in works)
        for work, position in zip(works, positions, strict=True):
            work.position = position

    def begin(self) -> None:
        """Start the first work of the queue."""
        work = self.queue.popleft()
        self.active = work
        self.clock.join(work.clock)
        self.clock.prune(self.machine.agents)
        work.clock = self.clock.copy()
        if self.machine.time is not None:
            self.machine.time.begins(work)
        for watch in self.machine.watches:
            watch.began(work)
        work.start(self.machine)

    def finished(self, work: Work) -> None:
        """All of `work` has ended: whatever follows in this stream is ordered behind it."""
        if self.machine.time is not None:
            self.machine.time.finished(work)
        for watch in self.machine.watches:
            watch.ended(work)
        self.active = None
        self.done = work.position
        self.clock.streams[self.number] = work.position
        self.machine.progress += 1
        self.machine.hosts_may_go = True
        self.machine.stream_changed(self)

    def identity(self, work: Work, what: str) -> Identity:
        return Identity(self.rank, f"{what} (stream {self.name})")
