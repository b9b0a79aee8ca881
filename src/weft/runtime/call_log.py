"""Who called what as the call of which number: a log of each rank, which others of its node read.

A log is a ring of entries, in memory that the ranks of a node share: a word with the call's number,
counted from 1, then its name. Ranks that disagree learn it before they wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from weft.base.errors import CallOrderError
from weft.runtime.backend import CALL_LOG_ENTRIES, CALL_LOG_ENTRY_BYTES

# A log as bytes, and the same as words.
Views = tuple[memoryview, memoryview]


class CallLog:
    """One rank's log, and those of the others within reach; `blocks` are all ranks'."""

    def __init__(self, world: str, rank: int, blocks: Sequence[memoryview | None]) -> None:
        self.world, self.rank = world, rank
        views = [
            None if one is None else (one.cast("B"), one.cast("B").cast("q")) for one in blocks
        ]
        self._own: Views | None = views[rank]
        self._others = [
            (other, *both) for other, both in enumerate(views) if both is not None and other != rank
        ]
        self._num_calls = 0
        self._texts: dict[str, bytes] = {}

    def call(self, name: str) -> int:
        """Write down that this rank now calls `name`, and compare; returns the call's number.

        Raises  CallOrderError: a rank's call of this number had another name
        """
        number = self._num_calls
        self._num_calls = number + 1
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = text_of(name)
        if self._own is None:
            return number
        start = number % CALL_LOG_ENTRIES * CALL_LOG_ENTRY_BYTES
        word, end = start // 8, start + CALL_LOG_ENTRY_BYTES
        # Cleared first and numbered last: a reader that finds the number before and after finds
        # the name that belongs to it, also when this rank laps the ring meanwhile.
        own, numbers = self._own
        numbers[word] = 0
        own[start + 8 : end] = text
        numbers[word] = number + 1
        for rank, log, numbers in self._others:
            # Most ranks are elsewhere: their number alone says so.
            if numbers[word] != number + 1 or log[start + 8 : end] == text:
                continue
            theirs = bytes(log[start + 8 : end])
            if theirs != text and numbers[word] == number + 1:
                raise CallOrderError(
                    f"operator call {number} on world {self.world!r}: rank {self.rank} calls "
                    f"{name}, but rank {rank} called {name_of(theirs)}; every rank must make the "
                    "same calls in the same order"
                )
        return number

    def close(self) -> None:
        """Let go of the logs' memory."""
        self._own, self._others = None, []


def text_of(name: str) -> bytes:
    """A call's name as a log holds it; what does not fit is told apart by its checksum."""
    text, room = name.encode(), CALL_LOG_ENTRY_BYTES - 8
    if len(text) > room:
        text = text[: room - 8] + b"%08x" % zlib.crc32(text)
    return text.ljust(room, b"\0")


def name_of(text: bytes) -> str:
    """The same read from a log: without the checksum of what did not fit."""
    name = text.rstrip(b"\0")
    cut = name[:-8] + b" .." if len(name) == len(text) else name
    return cut.decode(errors="replace")
