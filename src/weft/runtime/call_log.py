"""A log of each rank's calls by number, which the other ranks of its node read.

A log is a ring of entries, in memory that the ranks of a node share: a word with the call's number,
counted from 1, a digest of its name, then the name and what the call's tensors are like. Ranks that
disagree learn it before they wait for each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from weft.base.errors import CallOrderError
from weft.runtime.backend import CALL_LOG_ENTRIES, CALL_LOG_ENTRY_BYTES

# A log as bytes, and the same as words.
Views = tuple[memoryview, memoryview]
# Where an entry's text begins.
TEXT_BYTES = 16
# Names whose entries are kept ready.
MOST_TEXTS = 4096


class CallLog:
    """One rank's log, and those of the others within reach; `blocks` are all ranks'."""

    def __init__(self, world: str, rank: int, blocks: Sequence[memoryview | None]) -> None:
        self.world, self.rank = world, rank
        views = [
            None if one is None else (one.cast("B"), one.cast("B").cast("q")) for one in blocks
        ]
        self._own: Views | None = views[rank]
        self._all = {other: both for other, both in enumerate(views) if both is not None}
        self._others = [numbers for other, (_, numbers) in self._all.items() if other != rank]
        self._num_calls = 0
        self._texts: dict[tuple[str, str], tuple[int, bytes]] = {}

    def call(self, name: str, tensors: str = "") -> int:
        """Write down that this rank now calls `name`, and compare; returns the call's number.

        What is said of the `tensors` may differ by rank: it is shown where names differ.

        Raises  CallOrderError: a rank's call of this number had another name
        """
        number = self._num_calls
        self._num_calls = number + 1
        known = self._texts.get((name, tensors))
        if known is None:
            if len(self._texts) >= MOST_TEXTS:
                self._texts.clear()
            known = self._texts[name, tensors] = (digest_of(name), text_of(name, tensors))
        if self._own is None:
            return number
        digest, text = known
        start = number % CALL_LOG_ENTRIES * CALL_LOG_ENTRY_BYTES
        word = start // 8
        # Cleared first and numbered last: a reader that finds the number before and after finds
        # the name that belongs to it, also when this rank laps the ring meanwhile.
        own, numbers = self._own
        numbers[word] = 0
        own[start + TEXT_BYTES : start + CALL_LOG_ENTRY_BYTES] = text
        numbers[word + 1] = digest
        numbers[word] = number + 1
        for numbers in self._others:
            # Most ranks are elsewhere: their number alone says so.
            if numbers[word] != number + 1 or numbers[word + 1] == digest:
                continue
            if numbers[word] == number + 1:
                raise CallOrderError(self._disagreement_at(number, self._at(number)))
        return number

    def disagreement(self) -> str | None:
        """What ranks called, as one of this rank's last calls, that was not alike: the first such
        call. The same on every rank, once all have come to it."""
        if self._own is None:
            return None
        for number in range(max(0, self._num_calls - CALL_LOG_ENTRIES), self._num_calls):
            found = self._at(number)
            if len({digest for digest, _ in found.values()}) > 1:
                return self._disagreement_at(number, found)
        return None

    def unmatched(self) -> str | None:
        """The first call that some ranks have made and others have not: what to say where these
        have come to something else."""
        step = CALL_LOG_ENTRY_BYTES // 8
        counts = {rank: max(numbers[::step]) for rank, (_, numbers) in self._all.items()}
        fewest = min(counts.values(), default=0)
        late = [rank for rank, count in counts.items() if count == fewest]
        for rank, (_, text) in self._at(fewest).items():
            return (
                f"operator call {fewest} on world {self.world!r}: rank {rank} calls {text}, which "
                f"rank {late[0]} has not called; every rank must make the same calls"
            )
        return None

    def close(self) -> None:
        """Let go of the logs' memory."""
        self._own, self._others, self._all = None, [], {}

    def _at(self, number: int) -> dict[int, tuple[int, str]]:
        """Digest and text of the call of this number, of each rank whose log has it."""
        start = number % CALL_LOG_ENTRIES * CALL_LOG_ENTRY_BYTES
        word, found = start // 8, {}
        for rank, (log, numbers) in self._all.items():
            if numbers[word] == number + 1:
                text = bytes(log[start + TEXT_BYTES : start + CALL_LOG_ENTRY_BYTES])
                entry = (numbers[word + 1], shown(text))
                if numbers[word] == number + 1:
                    found[rank] = entry
        return found

    def _disagreement_at(self, number: int, found: Mapping[int, tuple[int, str]]) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, (_, text) in found.items():
            ranks.setdefault(text, []).append(rank)
        said = [
            f"rank {who[0]} calls {text}"
            if len(who) == 1
            else f"ranks {', '.join(map(str, who))} call {text}"
            for text, who in ranks.items()
        ]
        return (
            f"operator call {number} on world {self.world!r}: {', but '.join(said)}; every rank "
            "must make the same calls in the same order, with tensors that agree in what is named "
            "here"
        )


def digest_of(name: str) -> int:
    """By which names are compared."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def text_of(name: str, tensors: str = "") -> bytes:
    """A call as a log holds it, to be shown; what does not fit is left out."""
    text = (f"{name} ({tensors})" if tensors else name).encode()
    room = CALL_LOG_ENTRY_BYTES - TEXT_BYTES
    if len(text) > room:
        text = text[: room - 3] + b" .."
    return text.ljust(room, b"\0")


def shown(text: bytes) -> str:
    """The text read from a log."""
    return text.rstrip(b"\0").decode(errors="replace")
