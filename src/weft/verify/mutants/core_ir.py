"""Mutants of Core IR: every statement of a kernel that orders ranks dropped, weakened or moved.

    notify(announce, ready, owner, parts)    drop           left out
                                             relax-release  order=relaxed
                                             narrow         scope=device
                                             swap           before the tile is computed
                                             double         twice; where it is counted

Those of kernels (kernels.py) change what Triton made of the source; these change the kernel's IR,
so they show whether each signal that a plan has put in is needed. The caller composes kernels of
them and runs these, since the compiler is another room.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from weft.base.errors import CompileError
from weft.emulator.rewriting import Rewrite
from weft.ir import core, text
from weft.verify.mutants.records import Mutant, Site, lines_of
from weft.verify.mutants.results import (
    CAUGHT,
    EQUIVALENT,
    MISSED,
    NOT_RUN,
    MutantReport,
    Verdict,
)
from weft.verify.mutants.rewrites import ToFirstFinding
from weft.verify.mutants.search import (
    Bounds,
    ProgramFails,
    Run,
    most_steps,
    shows,
    side_by_side,
)

# The program with one of its kernels composed of this: the ways it is run.
Runs = Callable[[core.Kernel], Sequence[Run]]


def search_core_ir(
    kernel: core.Kernel, runs_of: Runs, bounds: Bounds, *, subject: str, ranks: int,
    steps: float | None = None,
) -> MutantReport:  # fmt: skip
    """The verdict over every mutant of one kernel; `runs_of(kernel)` runs a program with it.

    `steps` is what the program takes, by whoever has run it already.

    Raises  ProgramFails: the program itself shows something
    """
    begin = time.monotonic()
    if steps is None:
        steps = _steps_of(runs_of(kernel), bounds)
    rewrite = ToFirstFinding()
    rewrite.most_steps = most_steps(steps)

    def verdict(task: tuple[Mutant, core.Kernel, int]) -> Verdict:
        mutant, changed, turn = task
        is_over = bounds.limit_s is not None and time.monotonic() - begin > bounds.limit_s
        runs = [] if is_over else runs_of(changed)
        reason, numbers = argument(mutant), range(len(runs))
        trials = itertools.product(range(bounds.schedules), numbers)
        if reason and runs:
            trials = ((seed, run) for run, seed in bounds.trials_of_argued(turn, numbers))
        found = _verdict(mutant, ((runs[run], seed) for seed, run in trials), rewrite)
        if found.outcome == MISSED and reason:
            return replace(found, outcome=EQUIVALENT, by=reason)
        return found

    argued, tasks = Counter[str](), []
    for mutant, changed in mutations(kernel):
        tasks.append((mutant, changed, argued[argument(mutant)]))
        argued[argument(mutant)] += 1
    report = MutantReport(subject, ranks, list(side_by_side(verdict, tasks, bounds.jobs)))
    if report.of(NOT_RUN):
        report.bound = f"the limit of {bounds.limit_s:g} s was reached"
    report.seconds = time.monotonic() - begin
    return report


def argument(mutant: Mutant) -> str:
    """Why a mutant changes nothing that ranks could see; "" where nothing says so."""
    word = mutant.site.primitive.split()[0]
    if word == "advance" and mutant.kind == "swap":
        return (
            "every program has read the call's number before it counts itself as done, and nobody "
            "reads it again before this rank's next call"
        )
    return ""


def _steps_of(runs: Sequence[Run], bounds: Bounds) -> float:
    census = Rewrite()
    for run in runs:
        for seed in range(bounds.census):
            if shown := shows(run, seed, census):
                raise ProgramFails(run, seed, shown)
    return bounds.of_one_census(census.steps)


def _verdict(mutant: Mutant, trials: Iterable[tuple[Run, int]], rewrite: Rewrite) -> Verdict:
    begin, tried = time.monotonic(), 0
    for run, seed in trials:
        tried += 1
        try:
            shown = shows(run, seed, rewrite)
        except CompileError:  # where it was moved to, what it takes is not there
            shown = "does not compile"
        if shown:
            by = f"{shown} in {run.name}, seed {seed}"
            return Verdict(mutant, CAUGHT, by, tried, time.monotonic() - begin)
    outcome = MISSED if tried else NOT_RUN
    return Verdict(mutant, outcome, "", tried, time.monotonic() - begin)


def mutations(kernel: core.Kernel) -> Iterator[tuple[Mutant, core.Kernel]]:
    """Each mutant of a kernel, and the kernel with it. What comes out need not be legal."""
    for index, one in enumerate(kernel.statements):
        if isinstance(one, core.SIGNALS):
            site = Site(kernel.name, _primitive(one), lines_of(one.place))
            for kind, statements in _changes(kernel, index):
                yield Mutant(site, kind), replace(kernel, statements=statements)


def _primitive(one: core.Fused) -> str:
    of = one.signals if isinstance(one, core.Wait | core.Notify) else one.slot
    return f"{text.word(type(one))} {of}" + (f" at {one.slot}" if of != one.slot else "")


def _changes(kernel: core.Kernel, index: int) -> Iterator[tuple[str, tuple[core.Statement, ...]]]:
    before, one = kernel.statements[:index], kernel.statements[index]
    after = kernel.statements[index + 1 :]
    yield "drop", (*before, *after)
    # What is relaxed orders nothing, so it is not weaker yet if it reaches less.
    if isinstance(one, core.Wait | core.Notify) and one.order != "relaxed":
        relaxed = "relax-acquire" if isinstance(one, core.Wait) else "relax-release"
        yield relaxed, (*before, replace(one, order="relaxed"), *after)
        yield "narrow", (*before, replace(one, scope="device"), *after)
    if isinstance(one, core.Finish | core.Advance):
        yield "double", (*before, one, one, *after)
    yield "swap", _swapped(before, one, after)


def _swapped(before: tuple, one: core.Statement, after: tuple) -> tuple[core.Statement, ...]:
    """The statement on the other side of what it orders."""
    if isinstance(one, core.Notify | core.Finish | core.Advance):
        rest = _rest(before, after)
        first = next((i for i, each in enumerate(rest) if isinstance(each, core.FUSED)), len(rest))
        return (*rest[:first], replace(one, slot=EARLIER[one.slot]), *rest[first:])
    if isinstance(one, core.Wait | core.Credit):
        return (*_rest(before, after), replace(one, slot=LATER[one.slot]))
    raise AssertionError(one)


def _rest(before: tuple, after: tuple) -> tuple:
    return (*before, *after)


# A notify goes before the tile's product, the end of a call before all of it; a wait goes behind
# what it guards.
EARLIER = {"begin": "begin", "announce": "ready", "done": "begin", "end": "begin"}
LATER = {"begin": "end", "ready": "announce", "combine": "combine", "announce": "announce",
         "collect": "collect", "done": "done", "end": "end"}  # fmt: skip
