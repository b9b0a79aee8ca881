"""The kinds of work that queue on streams: launches, copies, words, tokens, events, barriers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.base.place import UNKNOWN, Place
from weft.emulator.actors import Actor
from weft.emulator.clocks import Clock
from weft.emulator.device import Stream, Work
from weft.emulator.memory import WORD
from weft.emulator.scheduler import Waiting


class KernelWork(Work):
    """A launch: `kernel` from the front end, `args` as its function takes them."""

    kind = "kernel"
    is_launch = True

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], args: Sequence[Any], *,
        cooperative: bool = False, place: Place = UNKNOWN, keep: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(place, keep)
        self.kernel = kernel
        self.grid = grid
        self.grid_values = tuple(np.int32(n) for n in grid)
        self.args = tuple(args)
        self.cooperative = cooperative
        self.total = grid[0] * grid[1] * grid[2]
        self.next = 0
        self.out_of_order: list[int] = []  # those to start, where a choice was taken
        self.ended = 0

    def program_id(self, index: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        return index % x, index // x % y, index // (x * y)

    def start(self) -> None:
        self.stream.device.start_kernel(self)

    def describe(self) -> str:
        return f"kernel {self.kernel.name}{list(self.grid)}"


class CopyWork(Work):
    """A copy engine's transfer between two strided views of equal shape and itemsize.

    `dst` and `src` are (address, shape, strides in bytes, numpy dtype).
    """

    kind = "copy"

    def __init__(self, dst: Any, src: Any, *, place: Place = UNKNOWN, keep: Any = None) -> None:
        super().__init__(place, keep)
        self.dst = dst
        self.src = src

    def start(self) -> None:
        Actor.of_work(self, "copy engine").copy(self.dst, self.src)
        self.stream.finished(self)


class WordCopyWork(Work):
    """The copy engine's signal: an 8-byte word behind all earlier work of its stream."""

    kind = "word copy"

    def __init__(self, dst: int, src: int, *, place: Place = UNKNOWN, keep: Any = None) -> None:
        super().__init__(place, keep)
        self.dst = dst
        self.src = src
        self.change = 0  # what a rewrite adds to the word

    def start(self) -> None:
        actor = Actor.of_work(self, "copy engine")
        actor.write_word(self.dst, actor.read_word(self.src) + self.change)
        self.stream.finished(self)


class WordWork(Work):
    """A word that a stream writes behind all its earlier work.

    A system-wide fence goes before it, and the stream's own device writes it: of that device's
    kernels a look of device scope is enough.
    """

    kind = "word write"

    def __init__(
        self, dst: int, value: int, dtype: np.dtype, *, place: Place = UNKNOWN, keep: Any = None
    ) -> None:
        super().__init__(place, keep)
        self.dst = dst
        self.value = value
        self.dtype = dtype

    def start(self) -> None:
        actor = Actor.of_work(self, "stream", of_device=True)
        actor.write_word(self.dst, self.value, self.dtype)
        self.stream.finished(self)


class WordWait(Work):
    """A stream's wait for a word: until `passes(seen, value)`, which is `wanted` in words.

    While it waits it is among the machine's waiters, like a program that is set aside.
    """

    kind = "word wait"

    def __init__(
        self, word: int, dtype: np.dtype, value: int, passes: Callable[[int, int], bool],
        wanted: str, *, place: Place = UNKNOWN, keep: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(place, keep)
        self.word = word
        self.dtype = dtype
        self.value = value
        self.passes = passes
        self.wanted = wanted
        self.waiting: Waiting | None = None
        self.begun = False

    def eligible(self) -> bool:
        device, itemsize = self.stream.device, self.dtype.itemsize
        allocation = device.checker.memory.find(self.word)
        if allocation is None:
            return True  # its access is a finding
        if not self.begun:
            self.begun = True
            self.clock.join(self.stream.clock)
            Actor.of_work(self, self.kind).begin_wait(self.word, self.dtype)
        seen = int(allocation.view(self.dtype)[(self.word - allocation.address) // itemsize])
        if self.passes(seen, self.value):
            return True
        cell = (self.word - allocation.address) // allocation.cell_bytes
        index = allocation.index(self.word, itemsize)
        is_new = self.waiting is None
        self.waiting = Waiting(allocation, cell, index, self.place, self.value, seen)
        if is_new:
            for watch in device.checker.watches:
                watch.waits(self, self.waiting)
        device.waiters.add(self)
        return False

    def wake(self) -> None:
        self.stream.changed()

    def start(self) -> None:
        actor = Actor.of_work(self, self.kind)
        self.look(actor)
        self.stream.clock.join(actor.clock)
        self.stream.finished(self)

    def look(self, actor: Actor) -> None:
        actor.acquire_word(self.word, self.dtype)

    def describe(self) -> str:
        allocation = self.stream.device.checker.memory.find(self.word)
        itemsize = self.dtype.itemsize
        name = "" if allocation is None else f" {allocation.word_name(self.word, itemsize)}"
        return f"{self.kind}{name}"


class TokenWork(WordWait):
    """A stream's wait for a word that a kernel sets to 1, which is 0 again when it has ended."""

    kind = "token"

    def __init__(self, word: int, *, place: Place = UNKNOWN, keep: Any = None) -> None:
        super().__init__(word, WORD, 1, operator.eq, "= 1", place=place, keep=keep)

    def look(self, actor: Actor) -> None:
        actor.take_word(self.word)


class Event:
    """A point in a stream; `clock` is what is known to whoever waits for it."""

    def __init__(self) -> None:
        self.done = False
        self.clock = Clock()
        self.waiters: list[Stream] = []


class EventRecord(Work):
    kind = "event record"

    def __init__(self, event: Event, *, place: Place = UNKNOWN) -> None:
        super().__init__(place)
        self.event = event

    def start(self) -> None:
        self.event.clock.join(self.stream.clock)
        self.event.done = True
        self.stream.finished(self)
        for stream in self.event.waiters:
            stream.changed()


class EventWait(Work):
    kind = "event wait"

    def __init__(self, event: Event, *, place: Place = UNKNOWN) -> None:
        super().__init__(place)
        self.event = event

    def eligible(self) -> bool:
        if not self.event.done and self.stream not in self.event.waiters:
            self.event.waiters.append(self.stream)
        return self.event.done

    def start(self) -> None:
        self.stream.clock.join(self.event.clock)
        self.stream.finished(self)


class BarrierWork(Work):
    """A barrier over streams of several ranks: all that name `key` end together."""

    kind = "barrier"

    def __init__(self, key: Any, parties: int, *, place: Place = UNKNOWN) -> None:
        super().__init__(place)
        self.key = key
        self.parties = parties

    def start(self) -> None:
        barriers = self.stream.device.barriers
        arrived = barriers.setdefault(self.key, [])
        arrived.append(self)
        if len(arrived) < self.parties:
            return
        del barriers[self.key]
        clock = Clock()
        for work in arrived:
            clock.join(work.stream.clock)
            clock.streams[work.stream.number] = work.position
        for work in arrived:
            work.stream.clock.join(clock)
            work.stream.finished(work)

    def describe(self) -> str:
        return f"barrier of {self.parties} ranks"
