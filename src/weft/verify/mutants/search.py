"""Runs every mutant of a program under schedules until one shows that something is wrong.

    report = search(runs, Bounds(), subject="all_gather", ranks=3)

A program is given as a few `Run`s: the ways it is run, for instance on one node and on two. Each is
run as it is first: what its kernels and hosts come by are the sites.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weft.emulator
from weft.base.errors import CompileError, UnsupportedError, UsageError, WeftError
from weft.base.report import Report
from weft.emulator.rewriting import Rewrite
from weft.emulator.scheduler import NoEnd
from weft.verify.mutants.notes import Note, notes_for
from weft.verify.mutants.records import Mutant, Site
from weft.verify.mutants.results import (
    CAUGHT,
    EQUIVALENT,
    MISSED,
    NOT_RUN,
    MutantReport,
    Verdict,
    mistakes_of,
)
from weft.verify.mutants.rewrites import SAYS_NOTHING, Census, OneMutant

# A mutant that takes so many times the program's own steps, and so many at least, has no end.
# Steps, not seconds: what becomes of a mutant must not depend on what else the machine is doing.
PATIENCE = 30
LEAST_STEPS = 100_000


@dataclass(frozen=True)
class Run:
    """One way to run the program: `run(seed, rewrite)` returns the emulator's report.

    It raises AssertionError where an answer is wrong.
    """

    name: str
    run: Callable[[int, Rewrite], Report]


@dataclass(frozen=True)
class Bounds:
    """How much is tried.

    Units   schedules: seeds of each run that a mutant may survive; argued: runs with one that is
            equivalent by an argument, whose mutants take runs and seeds in turn; census: seeds
            under which the program runs as it is; limit_s: seconds for all; jobs: processes, 0 is
            one for each CPU
    """

    schedules: int = 12
    argued: int = 9
    census: int = 3
    limit_s: float | None = None
    jobs: int = 0

    def of_one_census(self, steps: int) -> float:
        """What one run took, of the steps that the program took under all seeds of a census."""
        return steps / max(self.census, 1)

    def trials_of_argued(self, turn: int, runs: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(run, seed) of the mutant that is number `turn` of its argument.

        All of an argument's mutants go round all runs; odd seeds have laggards.
        """
        seeds = max(self.schedules, 1)
        for i in range(turn * self.argued, (turn + 1) * self.argued):
            yield runs[i % len(runs)], (i + 1) % seeds


class ProgramFails(UsageError):
    """The program itself shows something: `run` under `seed` shows it again."""

    def __init__(self, run: Run, seed: int, shown: str) -> None:
        super().__init__(
            f"{run.name}, seed {seed}: the program itself shows {shown}; put that right before its "
            "mutants are asked for"
        )
        self.run, self.seed = run, seed


class WrongAnswer(AssertionError):
    """What a rank computed is not what the reference says."""


def search(
    runs: Sequence[Run], bounds: Bounds, *, subject: str, ranks: int,
    choose: Callable[[list[Mutant]], Iterable[Mutant]] | None = None,
    on_mutant: Callable[[int, int], None] | None = None,
) -> MutantReport:  # fmt: skip
    """The verdict over every mutant of what `runs` run.

    `choose` may take some of the mutants; `on_mutant(done, all)` hears of the progress.

    Raises  ProgramFails: the program itself shows something; UsageError: a note cannot be read
    """
    begin = time.monotonic()
    survey = Survey(runs, bounds)
    everything = survey.mutants()
    chosen = everything if choose is None else list(choose(everything))
    notes = notes_for(everything)
    hunt = Hunt(survey, bounds, notes, begin)
    verdicts: list[Verdict] = []
    for verdict in hunt.verdicts(chosen):
        verdicts.append(verdict)
        if on_mutant is not None:
            on_mutant(len(verdicts), len(chosen))
    report = MutantReport(subject, ranks, verdicts, survey.unreached(), steps=sum(survey.steps))
    if choose is None:
        report.mistakes = mistakes_of(notes, verdicts)
    report.seconds = time.monotonic() - begin
    if report.of(NOT_RUN):
        report.bound = f"the limit of {bounds.limit_s:g} s was reached"
    return report


# ---------------------------------------------------------------------------------------------
# What there is to change


class Survey:
    """The program as it is: its mutants, which runs come by them, how many steps a run takes."""

    def __init__(self, runs: Sequence[Run], bounds: Bounds) -> None:
        self.runs = runs
        self.where: dict[Mutant, list[int]] = {}
        self.sites: set[Site] = set()
        self.steps: list[float] = []
        for number, run in enumerate(runs):
            census = Census()
            for seed in range(bounds.census):
                if shown := shows(run, seed, census):
                    raise ProgramFails(run, seed, shown)
            self.steps.append(bounds.of_one_census(census.steps))
            self.sites |= census.sites
            for mutant in census.mutants:
                if mutant.site in census.sites:
                    self.where.setdefault(mutant, []).append(number)
                else:
                    self.where.setdefault(mutant, [])

    def mutants(self) -> list[Mutant]:
        return [mutant for mutant, runs in self.where.items() if runs]

    def unreached(self) -> list[Site]:
        return sorted({mutant.site for mutant, runs in self.where.items() if not runs})


# ---------------------------------------------------------------------------------------------
# Mutant by mutant


@dataclass
class Hunt:
    """Goes after mutants, in this process or in several."""

    survey: Survey
    bounds: Bounds
    notes: Sequence[Note]
    begin: float
    # How often the run of a number has caught a mutant, and how often it was tried, by seed.
    catches: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    caught_by: dict[Site, list[tuple[int, int]]] = field(default_factory=dict)
    argued: Counter[str] = field(default_factory=Counter)  # mutants, by the reason

    def verdicts(self, mutants: Sequence[Mutant]) -> Iterator[Verdict]:
        return side_by_side(self.verdict, mutants, self.bounds.jobs)

    def verdict(self, mutant: Mutant) -> Verdict:
        begin = time.monotonic()
        rewrite, tried = OneMutant(mutant), 0
        reasons = [note.reason for note in self.notes if note.covers(mutant)]
        trials = self._argued(mutant, reasons[0]) if reasons else self._trials(mutant)
        for number, seed in trials:
            if self._is_over():
                return Verdict(mutant, NOT_RUN, "", tried, time.monotonic() - begin)
            run = self.survey.runs[number]
            rewrite.most_steps = most_steps(self.survey.steps[number])
            shown = shows(run, seed, rewrite)
            tried += 1
            caught, all_tries = self.catches.get((number, seed), (0, 0))
            self.catches[number, seed] = (caught + bool(shown), all_tries + 1)
            if shown:
                by = f"{shown} in {run.name}, seed {seed}"
                self.caught_by.setdefault(mutant.site, []).append((number, seed))
                return Verdict(mutant, CAUGHT, by, tried, time.monotonic() - begin)
        outcome, by = (EQUIVALENT, reasons[0]) if reasons else (MISSED, "")
        return Verdict(mutant, outcome, by, tried, time.monotonic() - begin)

    def _argued(self, mutant: Mutant, reason: str) -> Iterator[tuple[int, int]]:
        turn = self.argued[reason]
        self.argued[reason] += 1
        yield from self.bounds.trials_of_argued(turn, self.survey.where[mutant])

    def _trials(self, mutant: Mutant) -> Iterator[tuple[int, int]]:
        """(run, seed) pairs, those first that are likely to catch it for their time.

        First what caught others of its site; then whatever caught most of all mutants, and of a run
        that has shown nothing so far the less the more often it was tried.
        """
        runs = self.survey.where[mutant]
        left = {run: list(range(self.bounds.schedules)) for run in runs}
        for run, seed in dict.fromkeys(reversed(self.caught_by.get(mutant.site, ()))):
            if seed in left.get(run, ()):
                left[run].remove(seed)
                yield run, seed
        while any(left.values()):
            yield self._likeliest(left)

    def _likeliest(self, left: dict[int, list[int]]) -> tuple[int, int]:
        """The best of the seeds that are left of each run; it is left no longer."""

        def worth(trial: tuple[int, int]) -> float:
            caught, tried = self.catches.get(trial, (0, 0))
            run = trial[0]
            in_vain = self.bounds.schedules - len(left[run])
            return (caught + 1) / (tried + 2) / (1 + in_vain) / max(self.survey.steps[run], 1)

        run, seed = max(((run, seed) for run, seeds in left.items() for seed in seeds), key=worth)
        left[run].remove(seed)
        return run, seed

    def _is_over(self) -> bool:
        limit = self.bounds.limit_s
        return limit is not None and time.monotonic() - self.begin > limit


def side_by_side(
    verdict: Callable[[Any], Verdict], tasks: Sequence[Any], jobs: int
) -> Iterator[Verdict]:
    """The verdict of each task, in order; in `jobs` processes, 0 is one for each CPU."""
    jobs = jobs or os.cpu_count() or 1
    if min(jobs, len(tasks)) < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(verdict, tasks)
        return
    global _verdict, _tasks
    _verdict, _tasks = verdict, tasks
    try:
        # Tasks and their runs are closures: the children have them because they are forks.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, context, initializer=_alone) as pool:
            yield from pool.map(_verdict_of, range(len(tasks)))
    finally:
        _verdict, _tasks = None, ()


_verdict: Callable[[Any], Verdict] | None = None
_tasks: Sequence[Any] = ()


def _verdict_of(index: int) -> Verdict:
    assert _verdict is not None
    return _verdict(_tasks[index])


def _alone() -> None:
    """A fork has lost torch's threads, and must not wait for them."""
    import torch

    torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------
# One run


def most_steps(steps: float) -> float:
    """What a mutant may take of a program that takes so many steps itself."""
    return max(LEAST_STEPS, PATIENCE * steps)


def shows(run: Run, seed: int, rewrite: Rewrite) -> str:
    """What one run shows: kinds of findings, a wrong answer, an error; "" where all is well.

    Raises  the emulator's own errors: they say nothing of the program
    """
    try:
        report = run.run(seed, rewrite)
    except NoEnd:
        return "no end"
    except AssertionError:
        return "wrong answer"
    except (UnsupportedError, CompileError):
        raise
    except WeftError as error:
        return type(error).__name__
    except Exception as error:
        if _is_ours(error):
            raise
        return type(error).__name__
    return ", ".join(sorted({finding.kind for finding in report} - SAYS_NOTHING))


_EMULATOR = Path(weft.emulator.__file__).parent


def _is_ours(error: BaseException) -> bool:
    """Was it raised by the emulator's own code?"""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_EMULATOR)
