"""`weft verify --exhaustive` and `--schedules`: subjects explored or sampled, into one report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weft.base.counts import counted
from weft.base.report import Finding, Report
from weft.emulator.observation import Observer
from weft.tools.subjects import AnySubject
from weft.verify.determinism import nondeterministic
from weft.verify.exploration.minimise import minimised
from weft.verify.exploration.replay import Replay, recorded
from weft.verify.exploration.search import Bounds, Found, Ran, Search, search
from weft.verify.laggards import Laggards

# So many findings get a replay of their own; each takes some runs to be made small.
REPLAYS_KEPT = 5


@dataclass
class Explored:
    """What became of all subjects together; `replays` are the files written, by finding;
    `unwritten` says of each other one why it is not there."""

    report: Report
    searches: list[tuple[AnySubject, Search]] = field(default_factory=list)
    replays: dict[tuple, str] = field(default_factory=dict)
    unwritten: list[str] = field(default_factory=list)

    @property
    def executions(self) -> int:
        return sum(one.executions for _, one in self.searches)

    @property
    def abandoned(self) -> int:
        return sum(one.abandoned for _, one in self.searches)


def explore_all(
    subjects: Sequence[AnySubject], bounds: Bounds, *, folder: str,
    on_execution: Callable[[], None] = lambda: None,
) -> Explored:  # fmt: skip
    """Every subject to its end, or until `bounds`, which are for all of them, are reached.

    Each gets an equal share of what is left, so that no large one keeps the others from their turn.
    """
    started = time.monotonic()
    report: Report | None = None
    searches: list[tuple[AnySubject, Search]] = []
    replays: dict[tuple, str] = {}
    unwritten: list[str] = []
    # Which ways were cut, by what each got of the bounds.
    cut: dict[str, list[str]] = {}
    done = 0
    for number, subject in enumerate(subjects):
        if report is not None and done >= bounds.executions:
            report.complete = False
            cut["not begun"] = [one.variant for one in subjects[number:]]
            break
        turns = len(subjects) - number
        left = replace(
            bounds, executions=max(1, (bounds.executions - done) // turns),
            seconds=max(0.0, bounds.seconds - (time.monotonic() - started)) / turns,
        )  # fmt: skip
        one = search(
            subject.run, left, deterministic=subject.deterministic,
            on_execution=lambda _: on_execution(),
        )  # fmt: skip
        searches.append((subject, one))
        done += one.executions
        if one.bound:
            one.bound = _share(one.bound, left, bounds)
            cut.setdefault(one.bound, []).append(subject.variant)
        if report is None:
            report = one.report
        else:
            report.merge(one.report)
        for found in one.found[: REPLAYS_KEPT - len(replays)]:
            path = _replay_path(folder, subject, found.finding)
            try:
                shortest(subject, found).write(path)
                replays[found.finding.key()] = path
            except OSError as error:  # what was found is worth more than its file
                unwritten.append(f"cannot write the replay {path}: {error.strerror}")
    assert report is not None, "explore_all: no subject"
    report.bound = "; ".join(f"{words} ({', '.join(ways)})" for words, ways in cut.items())
    return Explored(report, searches, replays, unwritten)


def shortest(subject: AnySubject, found: Found) -> Replay:
    """The execution that shows the finding, with as few turns as may be."""
    turns = minimised(subject.run, found.choices, found.finding)
    return recorded(subject.to_json(), turns, found.finding, subject.file)


def _share(bound: str, left: Bounds, bounds: Bounds) -> str:
    """A bound that was reached, with what was asked for where a subject got a share of it."""
    if bound.endswith((" execution", " executions")) and bound[0].isdigit():
        most = counted(bounds.executions, "execution")
        return most if left.executions == bounds.executions else f"{left.executions} of {most}"
    if bound.endswith(" seconds"):
        own, most = f"{left.seconds:.3g}", f"{bounds.seconds:g} seconds"
        return most if own == f"{bounds.seconds:.3g}" else f"{own} of {most}"
    return bound


def _replay_path(folder: str, subject: AnySubject, finding: Finding) -> str:
    name = re.sub(r"\W+", "_", f"{os.path.basename(subject.name)} {subject.variant}").strip("_")
    stem = f"{name}.{finding.kind.replace(' ', '_')}"
    path, number = os.path.join(folder, f"{stem}.json"), 2
    while os.path.exists(path):
        path, number = os.path.join(folder, f"{stem}_{number}.json"), number + 1
    return path


class Sampler:
    """Runs seed after seed, each on the next subject in turn; results are compared where they
    are claimed to be the same.

    Every other round somebody is late: what a uniform draw takes thousands of seeds to show.
    """

    def __init__(self, subjects: Sequence[AnySubject]) -> None:
        self.subjects = subjects
        self._outcomes: dict[int, bytes] = {}

    def __call__(self, seed: int) -> Report:
        which = seed % len(self.subjects)
        subject = self.subjects[which]
        ran = self.run(seed)
        if subject.deterministic and ran.outcome is not None:
            if self._outcomes.setdefault(which, ran.outcome) != ran.outcome:
                ran.report.add(nondeterministic(ran.report))
        return ran.report

    def run(self, seed: int, observers: Sequence[Observer] = ()) -> Ran:
        """The run of one seed, the same each time."""
        round_number, which = divmod(seed, len(self.subjects))
        chooser = Laggards(seed) if round_number % 2 else None
        return self.subjects[which].run(chooser, seed=seed, observers=observers)
