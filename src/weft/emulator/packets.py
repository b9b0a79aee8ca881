"""A program's packets: words whose flag orders the data in the same word, and nothing else.

Writing a packet is a plain write to the checker: whoever has read the word, or written it, must be
known to have done so. Reading one is a read that its writer need not be known for, since nothing
is read before the flag has come.

One thing travels with a packet: which packets its sender had *read*. Loads come before stores that
depend on them on every machine, so the receiver may overwrite those; but it learns nothing of what
the sender has written. Packet reads are therefore an agent of their own, of which alone a packet's
clock speaks.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from weft.emulator.clocks import Clock
from weft.emulator.observation import Watch
from weft.emulator.protocols import Waiting
from weft.emulator.synchronising import Synchronising
from weft.emulator.transitions import Read, Write
from weft.emulator.waiters import SIGNALS_IN_A_TILE
from weft.emulator.words import WORD

FLAG_SHIFT = 32  # a packet is flag and data in one word


class PacketRead(Read):
    """A read of words whose flags have been seen."""

    __slots__ = ()

    def __call__(self, number: int) -> int:
        program = self.program
        writer = program.shadow.histories[number].writer
        is_packet = writer in program.memory.packet_segments

        def owns(segment: int) -> bool:
            return (is_packet and segment == writer) or program.owns(segment)

        return program.shadow.after_read(
            number, self.segment, program.clock, owns, self.conflict(number)
        )


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
        clock = super().publish()
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
            if self._reader >= 0:
                self._reads_known.learn(self._reader, self._reader_clk)
            of_rank, number = self.memory.packet_reads[self.work.rank], self.work.stream.number
            of_rank.setdefault(number, PastReads()).add(self.work.position, self._reads_known)

    # ------------------------------------------------------------------------------------------

    def _packet_lanes(self, ptr, mask, loc):
        """(allocation, element numbers, lanes) of a tile of words, for each allocation in it."""
        ptr = np.asarray(ptr)
        lanes = np.ones(ptr.shape, bool) if mask is None else np.broadcast_to(mask, ptr.shape)
        found = []
        while lanes.any():
            located = self._locate_scalar(ptr[lanes][0], 8, "packets", loc)
            if located is None:
                return found
            allocation, _ = located
            inside = lanes & (ptr >= allocation.address) & (ptr + 8 <= allocation.end)
            found.append((allocation, (ptr[inside] - allocation.address) // 8, inside))
            lanes = lanes & ~inside
        return found

    def put_packets(self, args, static, dtype, shape, loc):
        ptr, packets, *rest = args
        ptr = np.asarray(ptr)
        packets = np.broadcast_to(packets, ptr.shape)
        self.pause()
        reads = self._reads_to_send()
        for allocation, index, lanes in self._packet_lanes(ptr, rest[0] if rest else None, loc):
            self._send(allocation, index, packets[lanes], reads, loc)
        return np.zeros(shape, WORD)

    def _reads_to_send(self) -> Clock:
        reads = self._known_reads().copy()
        if self._reader >= 0:
            reads.learn(self._reader, self._reader_clk)
            self._reader_clk += 1
        return reads

    def _send(self, allocation, index, values, reads, loc) -> None:
        """Write packets to the words `index`."""
        view, place = allocation.view(WORD), self.locations[loc]
        if self.checks:
            self._check_flags(allocation, index, view[index], values, loc)
            segment = self.agents.segment(self.agent, self.clk, place)
            self.memory.packet_segments.add(segment)
            cells = self._cells(allocation, index, 8)
            access = PacketWrite(self, allocation, loc, cells, segment)
            self._touch_gathered(allocation, cells, access)
        view[index] = values
        factor = 8 // allocation.cell_bytes
        cells = (index * factor).tolist()
        for cell in cells:
            word = allocation.sync_word(cell)
            word.published.clear()
            word.packet = reads
        for watch in self._watches_of(len(cells)):
            for cell in cells:
                value = int(view[cell // factor])
                watch.signalled(self, allocation, cell, None, value, place, "set", None)
        self.waiters.words_changed(allocation, cells, place)

    def _watches_of(self, words: int) -> list[Watch]:
        """The watches that are called for each of so many packets: none for data, whose order does
        not matter."""
        watches, explores = self.watches, self.scheduler.explores
        return watches if explores or words <= SIGNALS_IN_A_TILE else []

    def _check_flags(self, allocation, index, old, new, loc) -> None:
        """A flag that the word holds already does not tell the new packet from the old."""
        factor = 8 // allocation.cell_bytes
        histories = self.shadow.histories
        flags = new >> FLAG_SHIFT
        for i in np.flatnonzero(old >> FLAG_SHIFT == flags).tolist():
            number = int(index[i])
            history = histories[allocation.shadow.item(number * factor)]
            if history.is_unwritten:
                continue  # nothing was ever written there
            self.findings.stale_flag(self, allocation, number, int(flags[i]), loc)
            return

    def wait_packets(self, args, static, dtype, shape, loc):
        ptr, flag, *rest = args
        ptr = np.asarray(ptr)
        result = np.zeros(ptr.shape, WORD)
        self.pause()
        for allocation, index, lanes in self._packet_lanes(ptr, rest[0] if rest else None, loc):
            self._receive(allocation, index, int(flag), loc)
            result[lanes] = allocation.view(WORD)[index]
        return result if shape else result[()]

    def _receive(self, allocation, index, flag, loc) -> None:
        """Wait until the words `index` hold `flag`; then they may be read."""
        view = allocation.view(WORD)
        factor = 8 // allocation.cell_bytes
        self._check_written(allocation, index * factor, loc)
        if self.scheduler.explores:
            self.pause("wait", lambda: bool(np.any((view[index] >> FLAG_SHIFT) != flag)))
        while (late := np.flatnonzero((view[index] >> FLAG_SHIFT) != flag)).size:
            number = int(index[late[0]])
            self.waiting = Waiting(
                allocation, number * factor,
                allocation.index(allocation.address + number * 8, 8),
                self.locations[loc], flag, int(view[number]) >> FLAG_SHIFT, is_packet=True,
            )  # fmt: skip
            self.set_aside()
        self.blocked = None
        for watch in self._watches_of(index.size):
            for number in index.tolist():
                watch.passed(
                    self, allocation, number * factor, flag, int(view[number]) >> FLAG_SHIFT,
                    self.locations[loc], None,
                )  # fmt: skip
        self._read_packets(allocation, index, factor, loc)

    def _check_written(self, allocation, cells, loc) -> None:
        """What memory held before anybody wrote it may look like a packet."""
        if not self.checks:
            return
        for cell in cells.tolist():
            history = self.shadow.histories[allocation.shadow.item(cell)]
            if history.is_unwritten:
                place = self.locations[loc]
                self.findings.uninitialised(self, allocation, cell, place)
                return

    def _read_packets(self, allocation, index, factor, loc) -> None:
        if self._reader < 0:
            identity = self.agents.identity[self.agent]
            self._reader = self.agents.add(identity, self.work.stream.number, self.work.position)
        if self.checks:
            place = self.locations[loc]
            segment = self.agents.segment(self._reader, self._reader_clk, place)
            cells = self._cells(allocation, index, 8)
            access = PacketRead(self, allocation, loc, cells, segment)
            self._touch_gathered(allocation, cells, access)
        flags = (allocation.sync.get(cell) for cell in (index * factor).tolist())
        clocks = {id(word.packet): word.packet for word in flags if word and word.packet}
        known = self._known_reads()
        for clock in clocks.values():
            known.join(clock)
        self.learn(list(clocks.values()))
