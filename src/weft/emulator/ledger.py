"""The books of a machine's signal words: signals, waits, and what does not add up.

It watches everything that synchronises, and finds signals that are lost, doubled or used by
nobody, and epochs that do not advance. Only symmetric words have books (of others it remembers
the last signal, to say why that did not order what came before it), and only `notify`,
`put_signal`, ordered stores and copy engines signal; tickets, locks and sums are nobody's signals.
A token of a stream is a signal, and its taking ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.base.place import Place
from weft.base.report import Finding, Side
from weft.base.vocabulary import Scope
from weft.emulator.clocks import NOWHERE, Agents, Clock
from weft.emulator.findings import Findings, Weak, element_name, index_of, tensor_name
from weft.emulator.memory import Allocation
from weft.emulator.observation import Watch
from weft.emulator.reachable import wait_places
from weft.emulator.scheduler import Waiting
from weft.emulator.shadow import Shadow

# So many looks of a program are remembered, to say which of them did not order what it did next.
LOOKS_KEPT = 8


@dataclass(slots=True)
class Signal:
    """One signal: `done` is how much its program had done before, `clk` where its release ended."""

    agent: int
    clk: int
    launch: int
    done: int
    place: Place
    before: int
    after: int
    how: str
    release: Scope | None

    @property
    def releases(self) -> bool:
        return self.release is not None


class Look(NamedTuple):
    """A wait, or another look, that found a signal; `acquire` is None where it is relaxed."""

    word: Word
    signal: Signal
    place: Place
    acquire: Scope | None
    device: int


@dataclass(slots=True)
class Word:
    """The book of one word.

    `needed` is the largest value that anybody waited for, `idle` how much was added by signals
    that announced nothing new. `replaced`, `repeated` and `fallen` are kept until it is clear that
    somebody waits: two SETs that do not know of each other, two to one value, the value before the
    word was set back and by whom.
    """

    allocation: Allocation
    cell: int
    last: Signal | None = None
    is_counter: bool = True
    awaited: bool = False
    seen: bool = True
    needed: int | None = None
    idle: int = 0
    first_idle: Signal | None = None
    replaced: tuple[Signal, Signal] | None = None
    repeated: tuple[Signal, Signal] | None = None
    fallen: tuple[int, Side] | None = None

    def ahead(self, value: int, other: int) -> int:
        """signed(value - other), in the word's width."""
        bits = self.allocation.cell_bytes * 8
        return (value - other + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


@dataclass
class Books:
    """The words of one array, on all ranks."""

    awaited: bool = False
    words: dict[int, Word] = field(default_factory=dict)


class Ledger(Watch):
    """See the module's words. `close` is for the end of a run in which everybody has ended."""

    def __init__(self, agents: Agents, shadow: Shadow, findings: Findings) -> None:
        self.agents = agents
        self.shadow = shadow
        self.findings = findings
        self._books: dict[Any, Books] = {}
        self._words: dict[int, Word] = {}
        # By id, and kept: what a host did has a place that would else go, and give away its id.
        self._visited: dict[int, Place] = {}
        self._kernels: dict[int, Any] = {}
        self._looks: dict[int, deque[Look]] = {}
        self._takes: dict[int, deque[Look]] = {}  # by stream, for all that is behind

    # ------------------------------------------------------------------------------------------
    # What happens

    def began(self, who: Any) -> None:
        kernel = getattr(who, "kernel", None)
        if kernel is not None:
            self._kernels[id(kernel)] = kernel

    def ended(self, who: Any) -> None:
        self._looks.pop(getattr(who, "agent", -1), None)

    def signalled(self, by, allocation, cell, before, after, place, how, release) -> None:
        if before is None:  # a packet is data
            return
        word = self._word(allocation, cell)
        done = getattr(by, "done", 1)  # a copy engine's signal comes behind its copies
        clk = by.clk - (release is not None)
        launch = 0 if by.work is None else by.work.number
        signal = Signal(by.agent, clk, launch, done, place, before, after, how, release)
        if allocation.heap_offset is None:
            word.last = signal
            return
        if how == "update":  # somebody gets the old value, and may go by it
            self._visited[id(place)] = place
            self._look(word)
            word.last = signal
            return
        if how == "set":
            self._set(word, signal, by.clock)
        else:
            self._added(word, signal)
        if word.ahead(after, before) < 0 and not word.seen:
            word.fallen = before, self._side(word, signal, "sets")
        word.last = signal
        word.seen = False

    def waits(self, by, waiting) -> None:
        self._visited[id(waiting.place)] = waiting.place
        if waiting.allocation.heap_offset is not None and not waiting.is_packet:
            word = self._word(waiting.allocation, waiting.cell)
            self._await(word, waiting.expected)

    def passed(self, by, allocation, cell, expected, seen, place, acquire) -> None:
        self._visited[id(place)] = place
        word = self._word(allocation, cell)
        if allocation.heap_offset is None:
            self._remember(self._looks, by.agent, by, word, place, acquire)
            return
        self._await(word, expected)
        word.seen, word.fallen = True, None
        self._remember(self._looks, by.agent, by, word, place, acquire)
        repeated, word.repeated = word.repeated, None
        if repeated and repeated[1].agent != by.agent and not self._knows(by.clock, repeated[1]):
            self._file_repeated(word, *repeated)

    def looked(self, by, what, allocation, cell, seen, place, acquire, release=None) -> None:
        self._visited[id(place)] = place
        word = self._word(allocation, cell)
        if allocation.heap_offset is not None:
            self._look(word)
        self._remember(self._looks, by.agent, by, word, place, acquire)

    def met(self, by: Any, allocation: Allocation, cell: int, place: Place, acquire: Scope | None):
        """An update is about to take a signal back, whose value it gets: a wait by
        compare-and-swap, for one."""
        self._remember(self._looks, by.agent, by, self._word(allocation, cell), place, acquire)

    def taken(self, by, allocation, cell, place) -> None:
        if allocation.heap_offset is None:
            return
        word = self._word(allocation, cell)
        self._remember(self._takes, self.agents.stream[by.agent], by, word, place, Scope.SYSTEM)
        self._look(word)
        take = Signal(by.agent, by.clk - 1, by.work.number, 1, place, 1, 0, "take", Scope.SYSTEM)
        if word.last is not None and self.agents.identity[word.last.agent].rank != by.rank:
            self._file(
                "unbounded wait",
                f"{self._name(word)} is a token, and another rank has set it: nothing bounds a"
                " stream's wait",
                self._side(word, take, "takes"),
                self._side(word, word.last, "sets"),
                remedy="wait for peers in a kernel, by wl.wait",
            )
        repeated, word.repeated = word.repeated, None
        if repeated:
            self._file_token(word, "is still 1", *repeated, "set it before")
        word.last, word.seen, word.fallen = take, False, None

    def touched(self, by: Any, allocation: Allocation, start: int, end: int, is_write: bool):
        """A torch operation reads or writes the cells from `start` to `end` of signal words."""
        if allocation.heap_offset is None:
            return
        for cell in list(allocation.sync):
            if not start <= cell < end:
                continue
            word = self._word(allocation, cell)
            if is_write:
                self._reset(word, by)
            else:
                self._look(word)

    def was_read(self, allocation: Allocation) -> None:
        """A word of it has been read by plain loads, in some order behind its signals."""
        if allocation.heap_offset is not None:
            self._book(allocation).awaited = True

    def _remember(
        self, into: dict[int, deque[Look]], key: int, by: Any, word: Word, place: Place,
        acquire: Scope | None,
    ) -> None:  # fmt: skip
        if word.last is not None:
            looks = into.get(key)
            if looks is None:
                looks = into[key] = deque(maxlen=LOOKS_KEPT)
            looks.append(Look(word, word.last, place, acquire, self.agents.device[by.agent]))

    def weak_link(self, by: Any, segment: int, kind: str) -> Weak | None:
        """Why a signal that `by` has seen did not order what was done in `segment`, before it.

        `kind` is what that was, e.g. "write"; None if `by` has seen no signal that should have.
        """
        identities, earlier = self.agents.identity, self.agents.segment_agent[segment]
        takes = self._takes.get(self.agents.stream[by.agent], ())
        for look in reversed([*takes, *self._looks.get(by.agent, ())]):
            signal = look.signal
            name = self._name(look.word)
            if signal.agent != earlier and not self._queued_before(earlier, signal.agent):
                # Asynchronous stores of a program are an agent of their own.
                if kind == "write" and identities[signal.agent] is identities[earlier]:
                    where = str(signal.place.outermost)
                    return Weak(
                        f"the write is asynchronous, and not complete where {name} is signalled at"
                        f" {where}", f"incomplete before {where}",
                    )  # fmt: skip
                continue
            same_rank = self.agents.device[earlier] == look.device
            if signal.release is None:
                where = str(signal.place.outermost)
                return Weak(f"the signal to {name} at {where} is relaxed", f"relaxed {where}")
            if look.acquire is None:
                where = str(look.place.outermost)
                return Weak(f"the wait for {name} at {where} is relaxed", f"relaxed {where}")
            narrow = signal.release is not Scope.SYSTEM or look.acquire is not Scope.SYSTEM
            if narrow and not same_rank:
                which = signal.place if signal.release is not Scope.SYSTEM else look.place
                whom = "a stream" if look.device == NOWHERE else "from rank to rank"
                text = f"the scope at {which.outermost} does not reach {whom}"
                return Weak(text, f"narrow {which.outermost}")
        issuer, clock = self.agents.issuer.get(segment, (-1, 0))
        if kind == "write" and by.clock.agents.get(issuer, -1) >= clock:  # through somebody else
            where = str(self.agents.segment_place[segment].outermost)
            text = "the write is asynchronous, and not complete where its program signals next"
            return Weak(text, f"incomplete {where}")
        return None

    def _queued_before(self, one: int, other: int) -> bool:
        """Do they work for one stream, `one` for an earlier entry of it?"""
        stream, position = self.agents.stream, self.agents.position
        return -1 < stream[one] == stream[other] and position[one] < position[other]

    # ------------------------------------------------------------------------------------------
    # What it makes of a word

    def _word(self, allocation: Allocation, cell: int) -> Word:
        key = allocation.address + cell * allocation.cell_bytes
        word = self._words.get(key)
        if word is None or word.allocation is not allocation:
            word = self._words[key] = Word(allocation, cell)
            if allocation.heap_offset is not None:
                self._book(allocation).words[key] = word
        return word

    def _book(self, allocation: Allocation) -> Books:
        key = (allocation.heap, allocation.heap_offset, allocation.name)
        book = self._books.get(key)
        if book is None:
            book = self._books[key] = Books()
        return book

    def _look(self, word: Word) -> None:
        """Somebody looks, for a value that is not known here."""
        word.is_counter = False
        word.seen = True
        if not word.awaited:
            self._await(word, None)

    def _await(self, word: Word, expected: int | None) -> None:
        if not word.awaited:
            word.awaited = True
            self._book(word.allocation).awaited = True
        if expected is None:
            word.is_counter = False
        elif word.needed is None or word.ahead(expected, word.needed) > 0:
            word.needed = expected
        if word.replaced:
            self._file_replaced(word)

    def _reset(self, word: Word, by: Any) -> None:
        if word.last is not None and not word.seen:
            side = self.findings.side(
                by, by.place, tensor=tensor_name(word.allocation), note="writes"
            )
            word.fallen = word.last.after, side
        word.last = word.needed = word.repeated = word.replaced = word.first_idle = None
        word.idle, word.seen = 0, True

    def _set(self, word: Word, signal: Signal, clock: Clock) -> None:
        word.is_counter = False
        last = word.last
        taken = last is not None and last.how == "take"
        if taken and not (word.seen or self._knows(clock, last)):
            self._file_token(word, "may still be 1", last, signal, "took the one before")
        if last is None or last.how != "set" or not (last.releases and signal.releases):
            return
        if last.agent == signal.agent:
            return
        if self._knows(clock, last):
            if signal.before == signal.after and last.launch != signal.launch and signal.done:
                word.repeated = (last, signal)
        elif not word.seen:
            word.replaced = (last, signal)
            if word.awaited:
                self._file_replaced(word)

    @staticmethod
    def _added(word: Word, signal: Signal) -> None:
        last = word.last
        if last is None or last.how != "add" or not (last.releases and signal.releases):
            return
        if (last.agent, last.done) == (signal.agent, signal.done):
            word.idle += word.ahead(signal.after, signal.before)
            word.first_idle = word.first_idle or signal

    def _knows(self, clock: Clock, signal: Signal) -> bool:
        """Is the signal in the past of one whose knowledge is `clock`?"""
        agents = self.agents
        if clock.streams.get(agents.stream[signal.agent], -1) >= agents.position[signal.agent]:
            return True
        return clock.agents.get(signal.agent, -1) >= signal.clk

    # ------------------------------------------------------------------------------------------
    # What does not add up

    def close(self) -> None:
        """Everybody has ended: which signals were too many, or for nobody?"""
        for book in self._books.values():
            if book.awaited:
                for word in book.words.values():
                    self._check_sum(word)
            else:
                self._check_used(book)
        self._books.clear()
        self._words.clear()

    def _check_sum(self, word: Word) -> None:
        if not word.is_counter or word.needed is None or word.last is None:
            return
        surplus = word.ahead(word.last.after, word.needed)
        if not 0 < surplus <= word.idle:
            return
        assert word.first_idle is not None
        self._file(
            "doubled signal",
            f"{self._name(word)} ends at {word.last.after}, and nobody waits for more than"
            f" {word.needed}: a program signals it again, having done nothing since it did before",
            self._side(word, word.first_idle, "adds again to"),
            remedy="signal once for all that was done",
        )

    def _check_used(self, book: Books) -> None:
        signals = [word for word in book.words.values() if word.last is not None]
        if not signals or any(map(self._is_read, signals)) or any(self._unvisited_waits()):
            return
        word = signals[0]
        assert word.last is not None
        self._file(
            "unused signal",
            f"{self._name(word)} is signalled, and no word of {word.allocation.name} was ever"
            " waited for, tested or read, on any rank",
            self._side(word, word.last, "signals"),
            remedy="wait for it where its data is used, or leave the signal out",
        )

    def _is_read(self, word: Word) -> bool:
        """Has somebody read the word by plain loads, ordered behind the signal?"""
        number = word.allocation.shadow.item(word.cell)
        return self.shadow.histories[number].reads is not None

    def _unvisited_waits(self) -> Iterator[Place]:
        """Lines of kernels that ran at which nobody has looked at a word yet."""
        for kernel in self._kernels.values():
            for place in wait_places(kernel):
                if id(place) not in self._visited:
                    yield place

    def _file_replaced(self, word: Word) -> None:
        assert word.replaced is not None
        (first, second), word.replaced = word.replaced, None
        name = self._name(word)
        same = first.after == second.after
        self._file(
            "doubled signal" if same else "lost signal",
            f"{name} is set to {second.after} by one party "
            + ("and " if same else f"where it was {first.after}, ")
            + "by another, neither of which knows of the other: whoever waits sees what the last"
            " one wrote before, and nothing of the first",
            self._side(word, second, "sets"),
            self._side(word, first, "had set"),
            remedy="give each party a word of its own, or let both add",
        )

    def _file_repeated(self, word: Word, first: Signal, second: Signal) -> None:
        self._file(
            "epoch not advanced",
            f"{self._name(word)} is set to {second.after}, which it is already since an earlier"
            " launch: a wait cannot tell the two apart",
            self._side(word, second, "sets again"),
            self._side(word, first, "had set"),
            remedy="let every call set another value: derive it from an epoch on the device",
        )

    def _file_token(self, word: Word, is_one: str, first: Signal, second: Signal, note: str):
        self._file(
            "lost signal",
            f"{self._name(word)} is a token, and is set to 1 where it {is_one}: the stream takes"
            " one for the two",
            self._side(word, second, "sets again"),
            self._side(word, first, note),
            remedy="set it again behind the stream that takes it, or give each round its own word",
        )

    def lost(self, waiting: Waiting) -> tuple[int, Side] | None:
        """The value that was there, unseen, and who set it back; without that, or with what was
        added since, the wait would be satisfied."""
        allocation, expected = waiting.allocation, waiting.expected
        word = self._words.get(allocation.address + waiting.cell * allocation.cell_bytes)
        if expected is None or word is None or word.fallen is None:
            return None
        value = word.fallen[0]
        if word.last is not None and word.last.how == "add":
            value += word.last.after  # it counts on from where it was set back to
        return word.fallen if word.ahead(value, expected) >= 0 else None

    def _file(
        self, kind: str, message: str, first: Side, second: Side | None = None, *, remedy: str
    ) -> None:
        self.findings.find(Finding(kind, message, first, second, remedy))

    def _side(self, word: Word, signal: Signal, note: str) -> Side:
        return self.findings.side_of(
            signal.agent, signal.place, tensor=tensor_name(word.allocation),
            index=index_of(word.allocation, word.cell), note=note,
        )  # fmt: skip

    @staticmethod
    def _name(word: Word) -> str:
        return element_name(word.allocation, index_of(word.allocation, word.cell))
