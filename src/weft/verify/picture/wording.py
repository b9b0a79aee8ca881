"""What an event, a party and a word are called in a picture, and what is said below it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.emulator.observation import Event, Party, Word
from weft.verify.picture.records import Lane
from weft.verify.picture.scene import Scene, lane_key
from weft.verify.picture.selection import like

SIGNALS = {"add": "adds {change} to", "set": "sets", "update": "updates"}


def party_title(party: Party) -> str:
    """Who it is within its rank, e.g. "push (0, 0, 0)" or "host"."""
    what = party.what.removeprefix("kernel ")
    if party.program is None:
        return what
    return f"{what} {short_program(party.program)}"


def short_program(program: tuple[int, ...]) -> str:
    """A program id without the axes that are not used."""
    used = list(program)
    while len(used) > 1 and used[-1] == 0:
        used.pop()
    return f"({', '.join(map(str, used))})"


def word_text(word: Word | None) -> str:
    if word is None:
        return "a word"
    index = ", ".join(map(str, word.index)) if isinstance(word.index, tuple) else word.index
    return f"{word.tensor}@rank{word.rank}[{index}]"


def event_text(event: Event) -> str:
    """What the party does, as the rest of a sentence whose subject it is."""
    word = word_text(event.word)
    if event.kind == "signal":
        return _signal_text(event, word)
    if event.kind == "pass":
        return f"passes: {word} {_wanted(event)}"
    if event.kind in ("stuck", "wait") and event.word is None:
        return f"waits for {event.text}"
    if event.kind in ("stuck", "wait"):
        verb = "stuck" if event.kind == "stuck" else "waits"
        return f"{verb}: {word} {_wanted(event)}, sees {event.before}"
    if event.kind in ("test", "load", "update"):
        return f"looks at {word}" + ("" if event.before is None else f", sees {event.before}")
    if event.kind == "access":
        return f"{event.text or 'accessed'} {word}"
    if event.kind == "finding":
        return event.text if event.word is None else f"{event.text}: {word}"
    if event.kind == "queue":
        return "is queued, has not begun"
    verb = {"begin": "begins", "end": "ends"}.get(event.kind, event.kind)
    return f"{verb} {event.text}".strip()


def _wanted(event: Event) -> str:
    return "to change" if event.expected is None else f"≥ {event.expected}"


def _signal_text(event: Event, word: str) -> str:
    before, after = event.before, event.after
    verb = SIGNALS.get(event.text, "updates")
    if before is None or after is None:
        return f"{verb.format(change='to')} {word}"
    return f"{verb.format(change=after - before)} {word}: {before} → {after}"


# ---------------------------------------------------------------------------------------------
# Below a picture: the order that a race lacks, and where the others were

MAX_ELSEWHERE = 5


def absent(scene: Scene, column: dict[object, int], lanes: Sequence[Lane]) -> str:
    """How far the later of two racing accesses knows of the party of the earlier one."""
    if scene.earlier is None or scene.later is None:
        return ""
    before, after = scene.events[scene.earlier], scene.events[scene.later]
    theirs, mine = lane_key(before.party), lane_key(after.party)
    if theirs not in column or mine not in column:
        return ""
    if theirs == mine:
        return f"nothing waits for the asynchronous access of step {before.step} to end"
    a, b = lanes[column[mine]].key, lanes[column[theirs]].key
    known = scene.known.get(theirs)
    if known is None:
        return f"no signal tells {a} of {b}, whose access was at step {before.step}"
    far = scene.events[known].step
    if far > before.step:
        return f"{a} knows of {b} up to step {far}, but not that its asynchronous access had ended"
    when = "came directly behind it" if far == before.step else f"was at step {before.step}"
    return f"signals tell {a} of {b} only up to step {far}; the access {when}"


def elsewhere(scene: Scene, groups: list[list[int]], column: dict[object, int]) -> tuple[str, ...]:
    """Where the parties without a column were at the end; of a deadlock also who had ended."""
    drawn = {like(scene.events[at]) for group in groups for at in group}
    last: dict[object, Event] = {}
    for event in scene.events:
        party = event.party
        # Of a kernel its programs tell; the whole of it only that it has not begun.
        is_on = party.what.startswith("kernel ") and not party.program and event.kind != "queue"
        if is_on:
            last.pop(lane_key(party), None)
        elif lane_key(party) not in column and event.kind != "finding":
            last[lane_key(party)] = event
    lines: dict[str, list[Event]] = {}
    ended: dict[str, list[Event]] = {}
    for event in last.values():
        title, rank = party_title(event.party), event.party.rank
        if event.kind == "stuck" and like(event) in drawn:
            continue  # one of those that the drawn one stands for
        if event.kind != "end":
            lines.setdefault(f"{title}: {event_text(event)}", []).append(event)
        elif event.party.program is not None:
            ended.setdefault(f"rank {rank} {title.rpartition(' (')[0]}", []).append(event)
    shown = []
    for text, events in list(lines.items())[:MAX_ELSEWHERE]:
        ranks = sorted({event.party.rank for event in events})
        shown.append(f"rank {', '.join(map(str, ranks))} {text} (step {events[-1].step})")
    if len(lines) > MAX_ELSEWHERE:
        shown.append(f"and {len(lines) - MAX_ELSEWHERE} more")
    if any(scene.events[at].kind == "stuck" for at in scene.anchors):
        # Somebody may have ended who should have signalled.
        for text, events in list(ended.items())[:MAX_ELSEWHERE]:
            programs = "a program" if len(events) == 1 else f"{len(events)} programs"
            shown.append(f"{text}: {programs} had ended, the last at step {events[-1].step}")
    return tuple(shown)
