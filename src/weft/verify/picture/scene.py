"""A recorded run and where in it a finding is: who knows of what, by signals and by streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.emulator.observation import Event, Party

LOOKS = ("load", "test", "update")
# Of the signals that a wait saw without acquiring them.
SEEN = 8


def lane_key(party: Party) -> tuple[object, ...]:
    """Launches of one kernel on one stream follow each other, and share a lane."""
    return (party.rank, party.stream, party.what, party.program)


def word_key(event: Event) -> object:
    word = event.word
    return None if word is None else (word.tensor, word.rank, word.index)


class Lanes:
    """The events of each lane, by position."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.lanes: dict[object, list[int]] = {}
        self.index: list[int] = []
        for at, event in enumerate(events):
            lane = self.lanes.setdefault(lane_key(event.party), [])
            self.index.append(len(lane))
            lane.append(at)

    def before(self, at: int) -> list[int]:
        index = self.index[at]
        return self.lanes[lane_key(self.events[at].party)][max(0, index - 1) : index]

    def after(self, at: int) -> list[int]:
        return self.lanes[lane_key(self.events[at].party)][self.index[at] + 1 :]


@dataclass(frozen=True)
class Scene:
    """Events in order; `anchors` are those that the finding itself is about, by position.

    `earlier` is what its second side did, `later` the access of a race that should come behind it.
    """

    events: Sequence[Event]
    anchors: tuple[int, ...]
    earlier: int | None = None
    later: int | None = None

    @cached_property
    def news(self) -> dict[int, tuple[int, ...]]:
        """For each event its causes, by position, less those that its lane had acquired before."""
        places = {event.step: i for i, event in enumerate(self.events) if event.kind != "access"}
        known: dict[object, set[int]] = {}
        found = {}
        for at, event in enumerate(self.events):
            if not event.causes:
                continue
            mine = known.setdefault(lane_key(event.party), set())
            found[at] = tuple(places[s] for s in event.causes if s in places and s not in mine)
            mine.update(event.causes)
        return found

    @cached_property
    def unordered(self) -> dict[int, tuple[int, ...]]:
        """Of each wait that passed the signals that it saw but did not acquire, by position."""
        signals: dict[object, list[int]] = {}
        since: dict[object, int] = {}  # the last SET of a word: nobody sees what was there before
        seen: dict[tuple[object, object], int] = {}
        found = {}
        for at, event in enumerate(self.events):
            if event.word is None:
                continue
            word = word_key(event)
            there = signals.setdefault(word, [])
            if event.kind == "signal":
                since[word] = len(there) if event.text == "set" else since.get(word, 0)
                there.append(at)
            elif event.kind == "pass" or event.kind in LOOKS:
                key = (lane_key(event.party), word)
                acquired = set(event.causes)
                first = max(since.get(word, 0), seen.get(key, 0), len(there) - SEEN)
                new = there[first:]
                found[at] = tuple(i for i in new if self.events[i].step not in acquired)
                seen[key] = len(there)
        return found

    @cached_property
    def lanes(self) -> Lanes:
        return Lanes(self.events)

    @cached_property
    def known(self) -> dict[object, int]:
        """Of each lane the last event that the finding's first side knows of, by position."""
        open_, seen = [self.anchors[-1]] if self.anchors else [], set()
        last: dict[object, int] = {}
        while open_:
            at = open_.pop()
            if at in seen:
                continue
            seen.add(at)
            key = lane_key(self.events[at].party)
            last[key] = max(at, last.get(key, -1))
            open_ += [*self.lanes.before(at), *self.news.get(at, ()), *self._earlier_work(at)]
        return last

    def _earlier_work(self, at: int) -> Sequence[int]:
        """Where the work before it in its stream ended, of an event that begins one."""
        party = self.events[at].party
        if self.events[at].kind != "begin" or not party.stream:
            return ()
        launches = self._ends.get((party.rank, party.stream), {})
        before = [launch for launch in launches if launch < party.launch]
        return launches[max(before)] if before else ()

    @cached_property
    def _ends(self) -> dict[tuple[int, str], dict[int, list[int]]]:
        """By rank and stream, and by launch: who ended."""
        found: dict[tuple[int, str], dict[int, list[int]]] = {}
        for at, event in enumerate(self.events):
            if event.kind == "end":
                party = event.party
                launches = found.setdefault((party.rank, party.stream), {})
                launches.setdefault(party.launch, []).append(at)
        return found
