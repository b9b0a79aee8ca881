"""Which events a picture is about: the finding's own, and of their causal past what is nearest.

An event's past is what its party did before it, and the signals that its waits acquired. The past
of a finding can be a whole run; a reader needs the part that decides. Nearest is measured in hops,
of which some are longer than others: a signal says more than a poll.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.base.place import Place
from weft.base.report import Finding, Side
from weft.emulator.observation import Event, Party, Word

# How far an event is from what follows it, by its kind; what is not named is far.
HOPS = {
    "signal": 2, "pass": 2, "stuck": 1, "access": 1, "finding": 1, "wait": 3, "begin": 4, "end": 4,
}  # fmt: skip
FAR = 7
LOOKS = ("load", "test", "update")
AT_A_WORD = ("signal", "wait", "pass", "stuck")
# Past this the reader is in another story.
HORIZON = 22
# Of the signals of a word that a finding is about, and of what a racing party did next.
NEIGHBOURS = 4
# Of the signals that a wait saw without acquiring them.
SEEN = 8


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
    def known(self) -> dict[object, int]:
        """Of each lane the last event that the finding's first side knows of, by position."""
        lanes = _Lanes(self.events)
        open_, seen = [self.anchors[-1]] if self.anchors else [], set()
        last: dict[object, int] = {}
        while open_:
            at = open_.pop()
            if at in seen:
                continue
            seen.add(at)
            key = lane_key(self.events[at].party)
            last[key] = max(at, last.get(key, -1))
            open_ += [*lanes.before(at), *self.news.get(at, ())]
        return last


def scene_of(events: Sequence[Event], finding: Finding | None) -> Scene:
    """Where in `events` the finding is; an access that left no event is put in at its step.

    Without a finding, or with one that has no place in the run (a wrong answer, another answer
    than before), it is about the last thing that each rank signalled or waited for.
    """
    events = list(events)
    if finding is None or finding.first.line is None:
        return _ending(events)
    stuck, end = _standstill(events, finding)
    if stuck:
        return Scene(events[:end], tuple(stuck))
    at = _position(events, finding)
    if at is None:
        return _ending(events)
    # A side names its party by rank, kernel and program; its launch and its stream are that of
    # what it did last.
    word = _word_of(finding.first) or events[at].word
    party = _party(events, at, finding.first) or _named(finding.first)
    events[at] = replace(events[at], party=party, word=word)
    if finding.kind != "race" or finding.second is None:
        at = _deed(events, at)
        second = None if finding.second is None else _last_at(events[:at], finding.second)
        return Scene(events, (at,) if second is None else (second, at), second)
    access = _access(events[:at], finding.second)
    earlier = next(i for i, event in enumerate(events) if event.step > access.step)
    events.insert(earlier, access)
    return Scene(events, (earlier, at + 1), earlier, at + 1)


def _ending(events: Sequence[Event]) -> Scene:
    last = {event.party.rank: at for at, event in enumerate(events) if event.kind in AT_A_WORD}
    return Scene(events, tuple(sorted(last.values())))


def _standstill(events: Sequence[Event], finding: Finding) -> tuple[list[int], int]:
    """Who is stuck, where the finding is one of them; and the end, before all is taken down."""
    stuck = [i for i, event in enumerate(events) if event.kind == "stuck"]
    side = finding.first
    if not any(_is(events[i].party, side) and _at(events[i].place, side) for i in stuck):
        return [], 0
    # Hosts wait for their programs: that they do says something only where no program does.
    programs = [i for i in stuck if events[i].word is not None]
    return programs or stuck, stuck[-1] + 1


def _deed(events: list[Event], at: int) -> int:
    """The signal that the finding is about, which is then all that is drawn; `at` if there is none.

    A signal is found wanting directly before it changes the word, or when all is over.
    """
    finding = events[at]
    for i in (at + 1, *range(at - 1, -1, -1)):
        if i < len(events) and events[i].kind == "signal" and (
            (events[i].party, events[i].place, word_key(events[i]))
            == (finding.party, finding.place, word_key(finding))
        ):  # fmt: skip
            del events[at]
            return i - (i > at)
    return at


def _last_at(events: Sequence[Event], side: Side) -> int | None:
    """The last thing that `side` names."""
    mine = [
        i for i, event in enumerate(events) if _at(event.place, side) and _is(event.party, side)
    ]
    return mine[-1] if mine else None


def _position(events: Sequence[Event], finding: Finding) -> int | None:
    """The finding's own event, else the last one of its party at its line, else of its party."""
    side = finding.first
    found = [
        i
        for i, event in enumerate(events)
        if event.kind == "finding" and event.text == finding.kind
    ]
    here = [i for i in found if _at(events[i].place, side)]
    if here or found:
        return (here or found)[0]
    mine = [i for i, event in enumerate(events) if _is(event.party, side)]
    at_line = [i for i in mine if _at(events[i].place, side)]
    return (at_line or mine or [None])[-1]


def _is(party: Party, side: Side) -> bool:
    """Is `party` whom `side` names?"""
    named = _named(side)
    same = party.what == named.what and party.program == named.program
    return party.rank == named.rank and same and named.stream in ("", party.stream)


def _named(side: Side) -> Party:
    """Whom `side` names; an actor on a stream is named with it: "copy engine (stream main)"."""
    name, _, stream = (side.kernel or "host").removesuffix(")").partition(" (stream ")
    program = None if side.program is None else (side.program + (0, 0))[:3]
    what = name if program is None else f"kernel {name}"
    rank = -1 if side.rank is None else side.rank
    return Party(rank, what, stream, program)  # type: ignore[arg-type]


def _party(events: Sequence[Event], at: int, side: Side) -> Party | None:
    """Whom `side` names: its last event up to `at` says, or else its first one after."""
    for event in (*reversed(events[: at + 1]), *events[at + 1 :]):
        if event.kind != "finding" and _is(event.party, side):
            return event.party
    return None


def _at(place: Place, side: Side) -> bool:
    frame = place.outermost
    return frame is not None and (frame.file, frame.line) == (side.file, side.line)


def _word_of(side: Side) -> Word | None:
    if side.tensor is None or side.index is None:
        return None
    tensor, _, rank = side.tensor.partition("@rank")
    return Word(tensor, int(rank) if rank.isdigit() else -1, side.index, 0)  # type: ignore[arg-type]


def _access(before: Sequence[Event], side: Side) -> Event:
    """The earlier access of a race as an event of its own: it synchronised nothing."""
    mine = [event for event in before if _is(event.party, side)]
    # Where nobody knows when: behind the first thing that its party did.
    step = side.step if side.step is not None else mine[0].step if mine else -1
    party = [event.party for event in mine if event.step <= step][-1:] or [_named(side)]
    return Event(step, "access", party[0], side.place, _word_of(side), text=side.note)


def lane_key(party: Party) -> tuple[object, ...]:
    """Launches of one kernel on one stream follow each other, and share a lane."""
    return (party.rank, party.stream, party.what, party.program)


def nearest(scene: Scene) -> list[int]:
    """The positions of the scene's past, the nearest first, up to the horizon."""
    past = _Past(scene)
    distance: dict[int, int] = {}
    queue = [(0, -at, at) for at in scene.anchors]
    heapq.heapify(queue)
    order = []
    while queue:
        far, _, at = heapq.heappop(queue)
        if at in distance:
            continue
        distance[at] = far
        order.append(at)
        for other in past.of(at):
            hop = far + _hop(scene.events[other])
            if other not in distance and hop <= HORIZON:
                heapq.heappush(queue, (hop, -other, other))
    return order


def _hop(event: Event) -> int:
    # A poll that acquired something is a wait that passed.
    return HOPS["pass"] if event.causes else HOPS.get(event.kind, FAR)


class _Lanes:
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


class _Past:
    """Who comes directly before an event: in its lane, by a signal, or at the finding's word."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.lanes = _Lanes(scene.events)
        self.words: dict[object, list[int]] = {}
        for at, event in enumerate(scene.events):
            if event.kind in AT_A_WORD and event.word is not None:
                self.words.setdefault(word_key(event), []).append(at)

    def of(self, at: int) -> Iterator[int]:
        event = self.scene.events[at]
        yield from self.lanes.before(at)
        yield from self.scene.news.get(at, ())
        yield from self.scene.unordered.get(at, ())
        if at in self.scene.anchors and event.word is not None:
            same = self.words.get(word_key(event), ())
            yield from [i for i in same if i < at][-NEIGHBOURS:]
            yield from [i for i in same if i > at][:NEIGHBOURS]
        if at == self.scene.earlier:
            # What it did next: the signal that should have told of the access may be there.
            later = self.scene.later if self.scene.later is not None else len(self.scene.events)
            after = [i for i in self.lanes.after(at) if i < later]
            yield from after[:NEIGHBOURS]


def word_key(event: Event) -> object:
    word = event.word
    return None if word is None else (word.tensor, word.rank, word.index)
