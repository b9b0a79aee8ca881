"""What became of each mutant, and of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from weft.base.counts import counted
from weft.verify.mutants.notes import Note
from weft.verify.mutants.records import LAUNCH, Mutant, Site

CAUGHT, MISSED, EQUIVALENT, NOT_RUN = "caught", "missed", "equivalent", "not run"

# Operators are called by weft's own tools, whose lines say nothing of a mutant.
TOOLS = Path(__file__).parents[2] / "tools"
# What to look at where a change was missed, by its kind or the first word of it.
NEXT = {
    "drop": "does anybody need it? If not, leave it out. If so, run what needs it: more ranks,"
    " sizes that divide nothing, several calls behind each other",
    "relax": "what was written before it must be read behind it by another program: find who reads"
    " that. If nobody does, order RELAXED says so",
    "narrow": "one of those that meet at this word must be on another rank: run on more ranks. If"
    " none ever is, the narrower scope says so",
    "value": "compare the number with what is signalled: run several calls behind each other, and"
    " ranks with different counts",
    "count": "let the words beside it come late, or not at all: sizes for which some ranks have"
    " nothing to send",
    "parity": "use the barrier's stages again: more tiles, or fewer stages, so that each phase has"
    " one before it",
    "peer": "give each rank numbers of its own, and run on more than two ranks",
    "swap": "what it comes behind must be read as soon as it has come: let somebody read it there",
    "double": "call again behind it: what counts twice is too early for the next call",
    "incomplete": "read what the stores wrote as soon as the signal has come",
}


def next_look(mutant: Mutant) -> str:
    """What to look at where nothing has shown a mutant: what would show it, or where to argue."""
    look = next(text for word, text in NEXT.items() if mutant.kind.startswith(word))
    lines = [line for line in mutant.site.lines if TOOLS not in Path(line.file).parents]
    # A statement of a compiler's IR has no line above which a note could stand.
    if not lines or " " in mutant.site.primitive.removeprefix(LAUNCH):
        return look
    note = f"# weft: equivalent-mutant {mutant.kind} of {mutant.site.primitive}: the reason"
    return f"{look}; or say above {lines[0]} why it changes nothing: {note}"


@dataclass(frozen=True)
class Verdict:
    """One mutant: `by` is what caught it and in which run, or the argument that nothing can.

    Units   runs: schedules that ran with it; seconds: of one process
    """

    mutant: Mutant
    outcome: str
    by: str = ""
    runs: int = 0
    seconds: float = 0.0


@dataclass
class MutantReport:
    """All mutants of one program. `ok`: each was caught, or is equivalent by an argument that held.

    `unreached` are sites in its kernels that none of the runs came by; their mutants are not
    counted. `mistakes` are notes of equivalence that are wrong or speak of nothing. `steps` is what
    the program takes as it is, once in each of its runs.
    """

    subject: str
    ranks: int
    verdicts: list[Verdict] = field(default_factory=list)
    unreached: list[Site] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: float = 0.0
    bound: str = ""  # why not all of them ran

    def of(self, outcome: str) -> list[Verdict]:
        return [one for one in self.verdicts if one.outcome == outcome]

    @property
    def caught(self) -> int:
        return len(self.of(CAUGHT))

    @property
    def missed(self) -> list[Verdict]:
        return self.of(MISSED)

    @property
    def equivalent(self) -> list[Verdict]:
        return self.of(EQUIVALENT)

    @property
    def ok(self) -> bool:
        return bool(self.verdicts) and not (self.missed or self.mistakes or self.of(NOT_RUN))

    def to_json(self) -> dict[str, object]:
        """What `weft verify --mutants --json` prints."""
        values: dict[str, object] = {
            "op": self.subject,
            "ranks": self.ranks,
            "mutants": len(self.verdicts),
            "caught": self.caught,
            "missed": [str(one.mutant) for one in self.missed],
            "equivalent": [
                {"mutant": str(one.mutant), "reason": one.by} for one in self.equivalent
            ],
            "caught_by": dict(
                Counter(one.by.partition(" in ")[0] for one in self.of(CAUGHT)).most_common()
            ),
            "not_run": len(self.of(NOT_RUN)),
            "unreached": [str(site) for site in self.unreached],
            "mistakes": self.mistakes,
            "seconds": round(self.seconds, 1),
        }
        if self.missed:
            values["next"] = {str(one.mutant): next_look(one.mutant) for one in self.missed}
        if self.bound:
            values["bound"] = self.bound
        values["ok"] = self.ok
        return values

    def __str__(self) -> str:
        counts = [f"{self.caught} caught", f"{len(self.equivalent)} equivalent"]
        counts += [f"{len(self.missed)} missed"] if self.missed else []
        not_run = self.of(NOT_RUN)
        counts += [f"{len(not_run)} not run: {self.bound}"] if not_run else []
        lines = [
            f"{self.subject} on {counted(self.ranks, 'rank')}: "
            f"{counted(len(self.verdicts), 'mutant')}, {', '.join(counts)}; {self.seconds:.1f} s"
        ]
        for one in self.missed:
            lines += [f"  missed: {one.mutant}", f"    next: {next_look(one.mutant)}"]
        lines += [f"  mistake: {mistake}" for mistake in self.mistakes]
        lines += [f"  equivalent: {one.mutant}\n    {one.by}" for one in self.equivalent]
        lines += [f"  never reached: {site}" for site in self.unreached]
        return "\n".join(lines)


def mistakes_of(notes: list[Note], verdicts: list[Verdict]) -> list[str]:
    """Notes that speak of nothing, and notes that a run has disproved."""
    found = []
    for note in notes:
        covered = [one for one in verdicts if note.covers(one.mutant)]
        if not covered and not note.is_of_asynchronous_stores:
            found.append(f"{note}: no mutant is of these kinds here; take the note away")
        found += [
            f"{note}: it is not equivalent: {one.mutant} was caught, {one.by}"
            for one in covered
            if one.outcome == CAUGHT
        ]
    return found
