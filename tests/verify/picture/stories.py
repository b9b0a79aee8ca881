"""Runs made up for pictures: each line tells one event, and steps count by themselves."""

from __future__ import annotations

from weft.base.place import Frame, Place
from weft.base.report import Finding, Side
from weft.emulator.observation import Event, Party, Word

FILE = "/nowhere/ring.py"


def at(line: int) -> Place:
    return Place((Frame(FILE, line, "ring"),))


def program(rank: int, number: int = 0, launch: int = 1) -> Party:
    return Party(rank, "kernel ring", "main", (number, 0, 0), launch)


def word(rank: int, index: int = 0, tensor: str = "ready") -> Word:
    return Word(tensor, rank, index, 1000 * rank + 8 * index)


class Story:
    """Events in order; `signal` and its like return their step."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def tell(self, kind: str, party: Party, line: int = 1, **fields) -> int:
        step = len(self.events)
        self.events.append(Event(step, kind, party, at(line), **fields))
        return step

    def signal(self, party: Party, to: Word, line: int = 2, before: int = 0) -> int:
        return self.tell(
            "signal", party, line, word=to, before=before, after=before + 1, text="add"
        )

    def passes(self, party: Party, at_word: Word, causes=(), line: int = 3, least: int = 1) -> int:
        return self.tell(
            "pass", party, line, word=at_word, before=least, expected=least, causes=tuple(causes)
        )

    def found(self, party: Party, kind: str, line: int) -> int:
        return self.tell("finding", party._replace(stream="", launch=0), line, text=kind)


def side(party: Party, line: int, note: str = "", step: int | None = None, **fields) -> Side:
    name = party.what.removeprefix("kernel ")
    return Side.at(
        at(line), rank=party.rank, kernel=name, program=party.program, note=note, step=step,
        **fields,
    )  # fmt: skip


def race(first: Party, second: Party, step: int | None, lines=(5, 4)) -> Finding:
    """`first` reads at lines[0] what `second` wrote at lines[1] behind `step`."""
    what = {"tensor": "inbox@rank1", "index": 3}
    return Finding(
        "race", "nothing orders this read",
        side(first, lines[0], "reads", **what), side(second, lines[1], "wrote", step, **what),
    )  # fmt: skip


def told_too_early() -> tuple[list[Event], Finding]:
    """Rank 0 signals, then writes; rank 1 waits for the signal and reads."""
    story, a, b = Story(), program(0), program(1)
    story.tell("begin", b)
    story.tell("begin", a)
    told = story.signal(a, word(1))
    story.tell("end", a)
    story.passes(b, word(1), [told])
    story.found(b, "race", 5)
    story.tell("end", b)
    return story.events, race(b, a, told)
