"""A program's packets: words whose flag orders the data in the same word, and nothing else.

Writing a packet is a plain write to the checker: whoever has read the word, or written it, must be
known to have done so. Reading one is a read that its writer need not be known for, since nothing
is read before the flag has come.

One thing travels with a packet: which packets its sender had *read*. Loads come before stores that
depend on them on every machine, so the receiver may overwrite those; but it learns nothing of what
the sender has written. Packet reads are therefore an agent of their own, of which alone a packet's
clock speaks.

`fence` lets later relaxed signals publish what came before it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from weft.base.vocabulary import Scope
from weft.emulator.accesses import RELEASE_COMPLETES_STORES, Read, Write
from weft.emulator.clocks import Clock
from weft.emulator.findings import index_of
from weft.emulator.memory import WORD, SyncWord, narrower
from weft.emulator.observation import Watch
from weft.emulator.scheduler import SIGNALS_IN_A_TILE
from weft.emulator.synchronising import Synchronising

FLAG_SHIFT = 32  # a packet is flag and data in one word


class PacketRead(Read):
    """A read of words whose flags have been seen."""

    __slots__ = ()

    def __call__(self, number: int) -> int:
        by = self.by
        writer = by.shadow.histories[number].writer
        is_packet = writer in by.memory.packet_segments
        self.owns = lambda segment: (is_packet and segment == writer) or by.owns(segment)
        return by.shadow.after_read(number, self)


class PacketWrite(Write):
    __slots__ = ()
    what = "packet"


class PastReads:
    """Which packets the works of one stream have read, up to each of them."""

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._known: list[Clock] = []

    def up_to(self, position: int) -> Clock:
        """The reads of all works up to that position."""
        count = bisect_right(self._positions, position)
        return self._known[count - 1] if count else Clock()

    def add(self, position: int, clock: Clock) -> None:
        if self._positions[-1:] != [position]:
            self._known.append(self.up_to(position).copy())
            self._positions.append(position)
        self._known[-1].join(clock)


class PacketAccess(Synchronising):
    """put_packets and wait_packets."""

    _reader = -1  # the agent of this program's packet reads
    _reader_clk = 0
    _reads_known: Clock | None = None

    def owns(self, segment: int) -> bool:
        return super().owns(segment) or self.agents.segment_agent[segment] == self._reader

    def publish(self) -> Clock:
        return self._with_reads(super().publish())

    def _with_reads(self, clock: Clock) -> Clock:
        """`clock`, and which packets this program has read."""
        if self._reader >= 0:
            clock.learn(self._reader, self._reader_clk)
            self._reader_clk += 1
        return clock

    def _known_reads(self) -> Clock:
        """What works before this one have read: of its stream, and of the rank's other streams as
        far as events and the host have put them before it."""
        if self._reads_known is None:
            self._reads_known = known = Clock()
            ended = self.work.clock.streams
            for number, past in self.memory.packet_reads[self.work.rank].items():
                known.join(past.up_to(ended.get(number, -1)))
        return self._reads_known

    def leave_packets(self) -> None:
        """The program ends: its reads lie before whatever follows in its stream."""
        if self._reads_known is not None:
            of_rank, number = self.memory.packet_reads[self.work.rank], self.work.stream.number
            past = of_rank.setdefault(number, PastReads())
            past.add(self.work.position, self._with_reads(self._reads_known))

    # ------------------------------------------------------------------------------------------

    def packet_words(self, ptr, mask, shape, loc):
        """(which lanes are on, [(which of those, allocation, its words' numbers)])."""
        mask = np.broadcast_to(True if mask is None else mask, shape)
        chosen = np.broadcast_to(ptr, shape)[mask]
        return mask, list(self.parts(chosen, WORD, "packets", loc)) if chosen.size else []

    def put_packets(self, args, static, dtype, shape, loc):
        ptr, packets, *rest = args
        self.pause()
        reads = self._with_reads(self._known_reads().copy())
        mask, parts = self.packet_words(ptr, rest[0] if rest else None, shape, loc)
        packets = np.broadcast_to(packets, shape)[mask]
        for lanes, allocation, index in parts:
            self._send(allocation, index, packets[lanes], reads, loc)
        return np.zeros(shape, WORD)

    def _send(self, allocation, index, values, reads, loc) -> None:
        """Write packets to the words `index`."""
        view, place = allocation.view(WORD), self.locations[loc]
        self._check_flags(allocation, index, view[index], values, loc)
        segment = self.agents.segment(self.agent, self.clk, place)
        self.memory.packet_segments.add(segment)
        self.touch(PacketWrite, allocation, index, 8, loc, segment)
        view[index] = values
        cells = (index * (8 // allocation.cell_bytes)).tolist()
        for cell in cells:
            word = allocation.sync_word(cell)
            word.published.clear()
            word.packet = reads
        for watch in self._watches_of(index):
            for cell, value in zip(cells, view[index].tolist(), strict=True):
                watch.signalled(self, allocation, cell, None, value, place, "set", None)
        self.waiters.words_changed(allocation, cells, place)

    def _watches_of(self, words: np.ndarray) -> list[Watch]:
        """The watches that are called for each of these packets: none for data, whose order does
        not matter."""
        watches, explores = self.watches, self.scheduler.explores
        return watches if explores or words.size <= SIGNALS_IN_A_TILE else []

    def _check_flags(self, allocation, index, old, new, loc) -> None:
        """A flag that the word holds already does not tell the new packet from the old."""
        same = old >> FLAG_SHIFT == new >> FLAG_SHIFT
        for number, flag in zip(index[same].tolist(), (new[same] >> FLAG_SHIFT).tolist()):
            if not self._is_unwritten(allocation, number):
                self.findings.fault("stale flag", self, loc, allocation, number, flag=flag)
                return

    def _is_unwritten(self, allocation, number: int) -> bool:
        cell = number * (8 // allocation.cell_bytes)
        return self.shadow.histories[allocation.shadow.item(cell)].is_unwritten

    def wait_packets(self, args, static, dtype, shape, loc):
        ptr, flag, *rest = args
        self.pause()
        mask, parts = self.packet_words(ptr, rest[0] if rest else None, shape, loc)
        result = np.zeros(shape, WORD)
        values = result[mask]
        for lanes, allocation, index in parts:
            self._receive(allocation, index, int(flag), loc)
            values[lanes] = allocation.view(WORD)[index]
        result[mask] = values
        return result if shape else result[()]

    def _receive(self, allocation, index, flag, loc) -> None:
        """Wait until the words `index` hold `flag`; then they may be read."""
        view = allocation.view(WORD)
        factor = 8 // allocation.cell_bytes
        # What memory held before anybody wrote it may look like a packet.
        for number in index.tolist():
            if self._is_unwritten(allocation, number):
                first = index_of(allocation, number * factor)
                self.findings.fault("uninitialised", self, loc, allocation, first)
                break
        if self.scheduler.explores:
            self.pause("wait", lambda: bool(np.any((view[index] >> FLAG_SHIFT) != flag)))
        while (late := np.flatnonzero((view[index] >> FLAG_SHIFT) != flag)).size:
            number = int(index[late[0]])
            seen = int(view[number]) >> FLAG_SHIFT
            self.set_aside(allocation, number, 8, loc, flag, seen, is_packet=True)
        self.blocked = None
        for watch in self._watches_of(index):
            for number in index.tolist():
                watch.passed(
                    self, allocation, number * factor, flag, int(view[number]) >> FLAG_SHIFT,
                    self.locations[loc], None,
                )  # fmt: skip
        self._read_packets(allocation, index, factor, loc)

    def _read_packets(self, allocation, index, factor, loc) -> None:
        if self._reader < 0:
            self._reader = self.new_agent()
        segment = self.agents.segment(self._reader, self._reader_clk, self.locations[loc])
        self.touch(PacketRead, allocation, index, 8, loc, segment)
        flags = (allocation.sync.get(cell) for cell in (index * factor).tolist())
        clocks = {id(word.packet): word.packet for word in flags if word and word.packet}
        known = self._known_reads()
        for clock in clocks.values():
            known.join(clock)
        self.learn(list(clocks.values()))


class Fences(PacketAccess):
    """Fences: what came before one travels with relaxed signals behind it, too.

    To raw atomics, tl's and those of assembly, the begin and the end of a kernel are fences too.
    """

    _fenced: Clock | None = None
    _fence_scope = Scope.SYSTEM
    _is_raw = False

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        # What relaxed looks found published since the last fence, by word.
        self._seen: dict[int, tuple[dict, Scope]] = {}

    def fence(self, args, static, dtype, shape, loc):
        self.complete_stores()
        self._fenced = self.publish()
        return np.int32(0)

    def fence_of(self, scope: Scope) -> None:
        """PTX's fence: relaxed looks before it acquire, relaxed signals behind it release."""
        if scope is Scope.BLOCK:
            return
        if RELEASE_COMPLETES_STORES:
            self.complete_stores()
        self.acquire_seen(scope)
        self._fenced, self._fence_scope = self.publish(), scope

    def acquire_seen(self, scope: Scope) -> None:
        """What relaxed looks have found is known behind a fence."""
        for published, looked in self._seen.values():
            within = narrower(scope, looked)
            self.learn(SyncWord(published).acquire(self.rank, within))
        self._seen.clear()

    def saw(self, word: SyncWord, scope: Scope) -> None:
        if self._is_raw:
            self._seen[id(word)] = dict(word.published), scope

    def atomic(
        self, allocation, index, dtype, loc, order, scope, change, *, how="update", raw=False,
        **more,
    ):  # fmt: skip
        fenced, modified = self._fenced or (self.work.clock if raw else None), how == "set"
        self._is_raw = raw

        def tracked(old):
            nonlocal modified
            new = change(old)
            modified = modified or (new is not None and bool(new != old))
            return new

        old = super().atomic(
            allocation, index, dtype, loc, order, scope, tracked, how=how, **more
        )  # fmt: skip
        if fenced is not None and modified and not order.releases:
            cell = index * (dtype.itemsize // allocation.cell_bytes)
            scope = narrower(scope, self._fence_scope)
            allocation.sync_word(cell).release(self.rank, scope, fenced.copy())
        return old
