"""Simulated time, laid over a run of the emulator: when each piece of work would begin and end.

The schedule is not touched: it decides, as always, who runs next and which order a race between
atomics has. Beside it every program, stream and host has a time of its own. Work adds to it;
whoever is ordered behind somebody (stream, event, signal, barrier, host) continues at the later of
the two times. What serves one at a time (copy engines, both directions of each rank's links, the
places for programs) is handed out in the order in which the schedule asks for it, each request to
the first gap that is long enough.

So times are those of one legal order, not of the order that the times would have led to: where
the order itself depends on time (a ticket, a spin lock, tiles given out by arrival) the answer is
only as good as the schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from weft.base.hardware import Hardware
from weft.base.schedule import Signal, Span
from weft.emulator.actors import tensors_in
from weft.emulator.device import Device, Work
from weft.emulator.memory import WORD, Allocation, behind
from weft.emulator.observation import Watch
from weft.emulator.timeline import Timeline
from weft.emulator.works import (
    BarrierWork,
    CopyWork,
    EventRecord,
    EventWait,
    KernelWork,
    TokenWork,
    WordCopyWork,
)


class Calendar:
    """The times at which one thing is taken: disjoint spans, in order."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def earliest(self, ready: float, duration: float) -> float:
        """The first time from `ready` on at which it is free for `duration`."""
        if duration <= 0:
            return ready
        place = bisect_right(self.ends, ready)
        while place < len(self.starts) and self.starts[place] < ready + duration:
            ready = max(ready, self.ends[place])
            place += 1
        return ready

    def take(self, start: float, end: float) -> None:
        """Take it from `start` to `end`, which must be free."""
        if end <= start:
            return
        place = bisect_right(self.starts, start)
        if place and self.ends[place - 1] == start:
            place -= 1
            self.ends[place] = end
        else:
            self.starts.insert(place, start)
            self.ends.insert(place, end)
        if place + 1 < len(self.starts) and self.starts[place + 1] == end:
            self.ends[place] = self.ends.pop(place + 1)
            del self.starts[place + 1]


# What one use takes: (of what, how long after its start, for how long).
Need = tuple[Calendar, float, float]


def earliest_for_all(ready: float, needs: Sequence[Need]) -> float:
    """The first start at which every need is free."""
    while True:
        start = ready
        for calendar, offset, duration in needs:
            start = max(start, calendar.earliest(start + offset, duration) - offset)
        if start <= ready:
            return ready
        ready = start


def take_all(start: float, needs: Sequence[Need]) -> None:
    for calendar, offset, duration in needs:
        calendar.take(start + offset, start + offset + duration)


class Sender(NamedTuple):
    """The sender of a change of a word, and when it sent it."""

    rank: int
    lane: str
    sent_us: float


class WordTimes:
    """How one signal word changed, by whom, and when each change is there for its readers."""

    def __init__(self) -> None:
        self.before: Any = 0
        self.changes: list[tuple[float, bool, int, Any, Sender | None]] = []

    def changed(
        self, old: Any, new: Any, arrival: float, is_set: bool, by: Sender | None = None
    ) -> None:
        if not self.changes or self.changes[-1][3] != old:
            self.before, self.changes = old, []  # somebody wrote it whom nobody times
        step = 0 if is_set else int(new) - int(old)
        self.changes.append((arrival, is_set, step, new, by))

    def reached(self, at_least: Any, kind: Any) -> tuple[float, Sender | None]:
        """When the word is first `at_least`, its changes coming in the order of their arrival,
        and by whose change; nobody's where it was so from the start."""
        value, when, by = int(self.before), 0.0, None
        for arrival, is_set, step, new, who in sorted(self.changes, key=lambda change: change[0]):
            if not behind(kind.type(value), at_least, kind):
                break
            value, when, by = (int(new) if is_set else value + step), arrival, who
        return when, by

    def showed(self, value: Any) -> float:
        """When the word last took the `value`."""
        return next((c[0] for c in reversed(self.changes) if c[3] == value), 0.0)

    def newest(self) -> tuple[float, Sender | None]:
        """When the value that is there now came, and by whose change."""
        return (self.changes[-1][0], self.changes[-1][4]) if self.changes else (0.0, None)

    def latest(self) -> float:
        return max((change[0] for change in self.changes), default=0.0)


class SimulatedTime(Watch):
    """The times of everything in one machine, which tells it of the works of streams."""

    def __init__(self, hardware: Hardware, device: Device) -> None:
        self.hardware = hardware
        self.device = device
        self.memory = device.checker.memory
        ranks = range(device.num_ranks)
        self.hosts = [0.0 for _ in ranks]
        self.streams: dict[int, float] = defaultdict(float)
        self.engines = [[Calendar() for _ in range(hardware.copies)] for _ in ranks]
        self.links = {
            (rank, is_far, is_out): Calendar()
            for rank in ranks for is_far in (False, True) for is_out in (False, True)
        }  # fmt: skip
        # Free from when on, by place; a place that is taken is None.
        self.places: list[list[float | None]] = [[] for _ in ranks]
        self.words: WeakKeyDictionary[Allocation, dict[int, WordTimes]] = WeakKeyDictionary()
        # When each packet is there, and who sent it.
        self.packets: WeakKeyDictionary[Allocation, dict[int, tuple[float, Sender | None]]] = (
            WeakKeyDictionary()
        )
        self.barriers: dict[Any, list[float]] = defaultdict(list)
        self.spans: list[Span] = []
        self.signals: list[Signal] = []
        self.compute: list[list[tuple[float, float]]] = [[] for _ in ranks]
        self.transfers: list[list[tuple[float, float]]] = [[] for _ in ranks]

    def timeline(self) -> Timeline:
        return Timeline(
            self.device.num_ranks, self.spans, self.compute, self.transfers, self.signals
        )

    def span(
        self, rank: int, lane: str, name: str, start: float, end: float, kind: str, about: int = -1
    ) -> None:
        if end > start:
            self.spans.append(Span(rank, lane, name, start, end, kind, about))

    def signal(self, name: str, by: Sender | None, rank: int, lane: str, arrival: float) -> None:
        """A wait on `lane` for what `by` sent."""
        if by is not None and (by.rank, by.lane) != (rank, lane):
            self.signals.append(Signal(name, *by, rank, lane, arrival))

    # ------------------------------------------------------------------------------------------
    # Links and signals

    def is_far(self, first: int, second: int) -> bool:
        return self.device.node_of(first) != self.device.node_of(second)

    def latency(self, source: int, to: int) -> float:
        """From a rank's signal until another one can see it."""
        if source == to:
            return 0.0
        return self.hardware.far_us if self.is_far(source, to) else self.hardware.signal_us

    def link(self, source: int, to: int, nbytes: int, offset: float = 0.0) -> list[Need]:
        """What moving bytes from one rank to another takes."""
        far = self.is_far(source, to)
        rate = self.hardware.far_gbps if far else self.hardware.copy_gbps
        duration = us(nbytes, rate)
        return [
            (self.links[source, far, True], offset, duration),
            (self.links[to, far, False], offset, duration),
        ]

    def word(self, allocation: Allocation, offset: int) -> WordTimes:
        words = self.words.get(allocation)
        if words is None:
            words = self.words[allocation] = defaultdict(WordTimes)
        return words[offset]

    # ------------------------------------------------------------------------------------------
    # Streams and hosts

    def queued(self, work: Work) -> None:
        work.queued_us = self.hosts[work.rank]

    def began(self, who: Any) -> None:
        """A work begins; programs keep their time themselves."""
        if not isinstance(who, Work):
            return
        work = who
        work.begin_us = max(self.streams[work.stream.number], work.queued_us)
        if isinstance(work, KernelWork):
            work.begin_us += self.hardware.launch_us
            work.end_us = work.begin_us
        elif isinstance(work, BarrierWork):
            self.barriers[work.key].append(work.begin_us)

    def ended(self, who: Any) -> None:
        """The end of a work is where its stream goes on."""
        if isinstance(who, Work):
            self._finished(who)

    def _finished(self, work: Work) -> None:
        end, lane = work.begin_us, f"stream {work.stream.name}"
        if isinstance(work, KernelWork):
            end = max(work.end_us, work.begin_us + self._through_memory(work))
            self.span(work.rank, lane, work.kernel.name, work.begin_us, end, "kernel")
        elif isinstance(work, CopyWork):
            end = self._copied(work)
        elif isinstance(work, WordCopyWork):
            end = self._word_copied(work)
        elif isinstance(work, TokenWork):
            end = self._taken(work)
        elif isinstance(work, EventRecord):
            work.event.us, work.event.by = end, Sender(work.rank, lane, end)
        elif isinstance(work, EventWait):
            end = max(end, work.event.us)
            by = work.event.by
            if by is not None:
                self.span(work.rank, lane, f"wait for {by.lane}", work.begin_us, end, "wait")
                self.signal("event", by, work.rank, lane, work.event.us)
        elif isinstance(work, BarrierWork):
            end = max(self.barriers[work.key]) + self.hardware.signal_us
            self.span(work.rank, lane, "barrier", work.begin_us, end, "wait")
        elif work.nbytes or work.flops:
            end = self._torch(work)
        self.streams[work.stream.number] = max(self.streams[work.stream.number], end)

    def _through_memory(self, work: KernelWork) -> float:
        """How long what a kernel touches takes through the memory, once."""
        touched = sum(min(high - low, nbytes) for low, high, nbytes in work.touched.values())
        return us(touched, self.hardware.memory_gbps)

    def _torch(self, work: Work) -> float:
        rate = self.hardware.sm_flops_per_us(work.operand_bytes) * self.hardware.num_sms
        start = work.begin_us + self.hardware.launch_us
        end = start + max(us(work.nbytes, self.hardware.memory_gbps), work.flops / rate)
        self.compute[work.rank].append((start, end))
        self.span(work.rank, "torch", work.describe(), start, end, "torch")
        return end

    def _copied(self, work: CopyWork) -> float:
        address, shape, _, dtype = work.dst
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        if not nbytes:
            return work.begin_us
        source, to = (self._rank_at(span[0], work.rank) for span in (work.src, work.dst))
        name = f"{nbytes} bytes {source} -> {to}"
        begin, end, _ = self._engine(work, nbytes, source, to, name)
        if source != to:
            self.transfers[work.rank].append((begin, end))
        return end

    def _word_copied(self, work: WordCopyWork) -> float:
        to = self._rank_at(work.dst, work.rank)
        allocation = self.memory.find(work.dst)
        name = "signal" if allocation is None else f"signal {allocation.word_name(work.dst, 8)}"
        _, end, lane = self._engine(work, 8, self._rank_at(work.src, work.rank), to, name)
        if allocation is not None:
            word = self.word(allocation, work.dst - allocation.address)
            by = Sender(work.rank, lane, end)
            word.changed(work.before, work.value, end, True, by)
        return end

    def _taken(self, work: TokenWork) -> float:
        allocation, lane = self.memory.find(work.word), f"stream {work.stream.name}"
        if allocation is None:
            return work.begin_us
        word = self.word(allocation, work.word - allocation.address)
        set_us, by = word.newest()
        end = max(work.begin_us, set_us) + self.hardware.token_us
        name = allocation.word_name(work.word, WORD.itemsize)
        self.span(work.rank, lane, f"wait {name}", work.begin_us, end, "wait")
        self.signal(name, by, work.rank, lane, end)
        word.changed(1, 0, end, True, Sender(work.rank, lane, end))
        return end

    def _engine(
        self, work: Work, nbytes: int, source: int, to: int, name: str
    ) -> tuple[float, float, str]:
        """One transfer of the rank's copy engines, on the one that can begin first: when, where."""
        hardware, rank = self.hardware, work.rank
        # The engine works through a stream's copies in one go: only the first is started.
        latency = 0.0 if nbytes == 8 else hardware.copy_us
        far = source != to and self.is_far(source, to)
        if far:
            latency += hardware.far_us
        rate = hardware.far_gbps if far else hardware.copy_gbps
        duration = us(nbytes, rate if source != to else hardware.memory_gbps / 2)
        links = self.link(source, to, nbytes, latency) if source != to else []
        starts = [
            earliest_for_all(work.begin_us, [(engine, 0.0, latency + duration), *links])
            for engine in self.engines[rank]
        ]
        start = min(starts)
        number = starts.index(start)
        take_all(start, [(self.engines[rank][number], 0.0, latency + duration), *links])
        end = start + latency + duration
        lane, kind = f"copy engine {number}", "signal" if nbytes == 8 else "copy"
        self.span(rank, lane, name, start, end, kind, source if kind == "copy" else -1)
        return start, end, lane

    def _rank_at(self, address: int, otherwise: int) -> int:
        allocation = self.memory.find(address)
        return otherwise if allocation is None else allocation.rank

    def host_at(self, rank: int, number: int | None) -> float:
        """The time of a rank's host, and with a stream's number of that stream too."""
        own = self.hosts[rank]
        return own if number is None else max(own, self.streams[number])

    def host_learns(self, rank: int, number: int | None, time: float) -> None:
        """What follows on a rank's host, and on the stream `number`, comes after `time`."""
        self.hosts[rank] = max(self.hosts[rank], time)
        if number is not None:
            self.streams[number] = max(self.streams[number], time)

    # ------------------------------------------------------------------------------------------
    # Programs

    def place(self, rank: int, ready: float) -> tuple[int, float]:
        """(place, start) for a program that could begin at `ready`: the place that was idle for
        the shortest time, or else the first to be free."""
        places = self.places[rank]
        idle = [(time, -i) for i, time in enumerate(places) if time is not None and time <= ready]
        if idle:
            number = -max(idle)[1]
        elif len(places) < self.device.num_sms:
            places.append(0.0)
            number = len(places) - 1
        else:
            number = min((time, i) for i, time in enumerate(places) if time is not None)[1]
        start = max(ready, places[number])
        places[number] = None
        return number, start

    def leave(self, rank: int, number: int, end: float) -> None:
        """A program leaves its place."""
        self.places[rank][number] = end


def us(nbytes: float, gbps: float) -> float:
    return nbytes / (gbps * 1e3)


def charge(work: Work, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
    """Note on `work` what `func` has read, written and multiplied."""
    from torch.utils.flop_counter import flop_registry

    packet = func.overloadpacket
    work.kind = str(packet).removeprefix("aten.")
    tensors = list(tensors_in((*args, *kwargs.values(), result)))
    # A tensor that is both an argument and the result is written only.
    known = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
    work.nbytes = sum(known.values())
    if packet in flop_registry:
        work.flops = flop_registry[packet](*args, **kwargs, out_val=result)
        work.operand_bytes = tensors[0].element_size()
