"""What an event, a party and a word are called in a picture."""

from __future__ import annotations

from weft.emulator.observation import Event, Party, Word

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
