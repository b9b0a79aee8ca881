"""Which events of a run a finding is about: its sides name parties and lines, not events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.base.place import Place
from weft.base.report import Finding, Side
from weft.emulator.observation import Event, Party, Word
from weft.verify.picture.scene import Scene, word_key

AT_A_WORD = ("signal", "wait", "pass", "stuck")


def scene_of(events: Sequence[Event], finding: Finding | None) -> Scene:
    """Where in `events` the finding is; an access that left no event is put in at its step.

    Without a finding, or with one that has no place in the run (a wrong answer, another answer
    than before), it is about the last thing that each rank signalled or waited for.
    """
    events = list(events)
    if finding is None or finding.first.line is None:
        return _ending(events)
    stuck, end = _deadlock(events, finding)
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
    if events[at].kind in ("begin", "end", "queue"):
        # All that is recorded of a host that raises is that it ended.
        events[at] = replace(events[at], kind="finding", place=finding.first.place)
        return Scene(events, (*(i for i in _ending(events).anchors if i < at), at))
    if finding.kind != "race" or finding.second is None:
        at = _deed(events, at)
        second = None if finding.second is None else _last_at(events[:at], finding.second)
        return Scene(events, (at,) if second is None else (second, at), second)
    access = _access(events[:at], finding.second)
    earlier = next((i for i, event in enumerate(events[:at]) if event.step > access.step), at)
    events.insert(earlier, access)
    return Scene(events, (earlier, at + 1), earlier, at + 1)


def _ending(events: Sequence[Event]) -> Scene:
    last = {event.party.rank: at for at, event in enumerate(events) if event.kind in AT_A_WORD}
    return Scene(events, tuple(sorted(last.values())))


def _deadlock(events: Sequence[Event], finding: Finding) -> tuple[list[int], int]:
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
