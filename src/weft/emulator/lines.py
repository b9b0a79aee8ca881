"""A program's lines: packets of 16 words, of which the last is the flag.

A line is one unit: whoever has seen its flag with wait_lines may read it. Lines of one tile are
units of their own, and come in any order.
"""

from __future__ import annotations

import numpy as np

from weft.base.errors import UsageError
from weft.emulator.packets import WORD, PacketAccess

LINE_WORDS = 16
LINE_BYTES = 128


class LineAccess(PacketAccess):
    """put_lines and wait_lines."""

    def put_lines(self, args, static, dtype, shape, loc):
        ptr, words, count = args
        words = np.broadcast_to(words, shape)
        self.pause()
        reads = self._reads_to_send()
        lines = [
            (allocation, int(index), words[row])
            for allocation, flags, rows in self._lines(ptr, count, loc)
            for index, row in zip(flags.tolist(), rows.tolist())
        ]
        # No order among lines: where this one begins is as good as anywhere.
        first = self.clk % len(lines) if lines else 0
        for number, (allocation, index, values) in enumerate(lines[first:] + lines[:first]):
            if number and not self.machine.explores:
                self.pause()
            flag = np.array([index])
            self._send(allocation, flag, _words(flag)[0], values, values[-1:], 0, reads, loc)
        return np.zeros(shape, WORD)

    def wait_lines(self, args, static, dtype, shape, loc):
        ptr, flag, count = args
        result = np.zeros(shape, WORD)
        self.pause()
        for allocation, flags, rows in self._lines(ptr, count, loc):
            words = _words(flags)
            self._receive(allocation, flags, words, int(flag), 0, loc)
            result[rows] = allocation.view(WORD)[words]
        return result

    def _lines(self, ptr, count, loc):
        """(allocation, numbers of the flag words, rows of the tile), for each allocation."""
        flags = np.asarray(ptr)[: max(int(count), 0), -1]
        if flags.size:
            self._check_alignment(int(flags[0]), loc)
        return [
            (allocation, np.atleast_1d(index), np.flatnonzero(lanes))
            for allocation, index, lanes in self._packet_lanes(flags, None, loc)
        ]

    def _check_alignment(self, flag: int, loc: int) -> None:
        """As on a GPU, where allocations are aligned and heaps begin on pages."""
        allocation = self.memory.find(flag)
        if allocation is None:
            return  # the access says so
        offset = flag + 8 - allocation.address + (allocation.heap_offset or 0)
        if offset % LINE_BYTES:
            self.fail(
                UsageError, "misaligned",
                f"lines of {allocation.name} at an address that {LINE_BYTES} does not divide", loc,
                remedy="a line is 16 words: begin at a multiple of 16 of an int64 tensor",
            )  # fmt: skip


def _words(flags: np.ndarray) -> np.ndarray:
    """All words of the lines with these flags, a row per line."""
    return flags[:, None] + np.arange(1 - LINE_WORDS, 1)
