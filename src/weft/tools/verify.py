"""`weft verify OP` or `weft verify SCRIPT.py`: what other schedules show, or all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.counts import counted
from weft.base.dtypes import parse_dtype
from weft.base.errors import UsageError
from weft.base.report import Finding, Report
from weft.tools import console, options, pictures
from weft.tools.check import CALLS, ONE_SLOT, SLOTS, Work
from weft.tools.emulate import say_if_idle
from weft.tools.programs import find_op
from weft.tools.subjects import (
    FEW_SMS,
    HOPPER,
    NUM_SMS,
    AnySubject,
    OpSubject,
    ScriptSubject,
    few_tiles_on_hopper,
    smallest,
    subject_of,
    subjects_of_op,
    subjects_on_hopper,
)
from weft.tools.words import (
    find_script,
    is_script,
    op_dtype,
    parse_shape,
    parse_some,
    parse_topology,
)

if TYPE_CHECKING:
    from weft.emulator.observation import Recorder
    from weft.verify.exploration.search import Bounds, Ran

DEFAULT_SCHEDULES = 20
DEFAULT_DTYPE = "fp32"
# Where failing executions are kept.
REPLAYS = os.path.join(".weft", "replays")
# Exploring multiplies with every rank: two of them show what one alone cannot.
SMALLEST_RANKS = 2


def verify(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="OP|SCRIPT.py",
            help="an operator, e.g. ag_gemm, your script, or a program in a file, FILE.py:PROGRAM",
            autocompletion=options.complete_subject,
        ),
    ] = "",
    ranks: Annotated[
        int | None,
        options.option(
            "N", "number of ranks (default: 4, or as --nodes says; 2 with --exhaustive)"
        ),
    ] = None,
    nodes: options.Nodes = "1",
    schedules: Annotated[
        int | None,
        options.option("N", "how many random schedules to run (default: 20, or one for each way)"),
    ] = None,
    seed: Annotated[int, options.option("N", "seed of the first schedule", min=0)] = 0,
    exhaustive: Annotated[
        bool, options.flag("run every schedule that could make a difference", "--exhaustive")
    ] = False,
    mutants: Annotated[
        bool,
        options.flag(
            "remove or weaken each signal and wait in turn: would that be found?", "--mutants"
        ),
    ] = False,
    replay: Annotated[
        str,
        options.option(
            "FILE", "run one failing execution again, from the FILE that --exhaustive has saved"
        ),
    ] = "",
    save: Annotated[
        str, options.option("FOLDER", "where --exhaustive saves failing executions")
    ] = REPLAYS,
    max_executions: Annotated[int, options.option("N", "bound of --exhaustive")] = 100_000,
    max_seconds: Annotated[
        float, options.option("S", "bound of --exhaustive and --mutants")
    ] = 600.0,
    max_megabytes: Annotated[float, options.option("MB", "bound of --exhaustive: memory")] = 4096.0,
    calls: Annotated[
        str,
        options.option(
            "WAYS",
            f"how an operator is called, some of {','.join(CALLS)} (default: all in turn;"
            " once with --exhaustive)",
        ),
    ] = "",
    num_sms: options.NumSms = NUM_SMS,
    arch: options.Arch = 0,
    shape: Annotated[
        str,
        options.option(
            "m=..,n=..",
            "an operator's sizes (default: small; with --exhaustive two tiles to a rank)",
        ),
    ] = "",
    dtype: options.Dtype = DEFAULT_DTYPE,
    html: options.Html = "",
    json: options.AsJson = False,
) -> int:
    """Run an operator or a script under many schedules; report what goes wrong in any of them.

    By default 20 random schedules are run, or one for each way in which the operator is done, if
    those are more. What is reported: races, deadlocks, other mistakes in
    synchronisation, wrong results. A script's own arguments follow `--`.
    """
    pictures.check_path(html)
    if exhaustive:
        pictures.check_folder(save, "--save")
    _check(subject, schedules, exhaustive, mutants, replay, max_executions, max_seconds)
    if replay:
        return run_replay(replay, html, json)
    if exhaustive and ranks is None and nodes == "1":
        ranks = SMALLEST_RANKS
    topology = parse_topology(ranks, nodes)
    subjects: list[AnySubject]
    work: Work | None = None
    if is_script(subject):
        _check_script(subject, shape, dtype, calls)
        args = context.meta.get("script_args", [])
        script = ScriptSubject(str(find_script(subject)), args, topology, num_sms, arch=arch)
        subjects = [script] if mutants else [*by_slots(script, exhaustive)]
    else:
        card = find_op(subject)
        small = exhaustive and not mutants
        default = smallest(card, topology.num_ranks) if small else card.default_shape
        sizes = parse_shape(shape, default)
        is_default = dtype == DEFAULT_DTYPE  # a program's dtypes are its own
        name = op_dtype(card, "" if is_default else dtype, DEFAULT_DTYPE).name
        work = Work(card, topology.num_ranks, sizes, name, topology.sizes)
        work.check_memory()
        ways = parse_some("--calls", calls, CALLS) or (["once"] if exhaustive else list(CALLS))
        there = few_tiles_on_hopper(work) if small and not shape else work
        subjects = _subjects(work, there, ways, num_sms, small, arch)
        if small and not shape:
            subjects = [replace(s, config=_smaller(s)) for s in subjects]
    if mutants:
        # The trials of a card are in fp32, and as well of 16 bits: what runs on Hopper.
        given = parse_dtype(dtype)
        chosen = ranks is not None or nodes != "1" or bool(shape) or given.itemsize == 1
        in_work = work if chosen else None
        return run_mutants(
            subjects[0], in_work, max_seconds, html, json, dtype=given.name, arch=arch
        )
    if exhaustive:
        from weft.verify.exploration.search import Bounds

        bounds = Bounds(max_executions, max_seconds, max_megabytes)
        return run_exhaustive(subjects, bounds, save, html, json)
    count = max(DEFAULT_SCHEDULES, len(subjects)) if schedules is None else schedules
    return run_schedules(subjects, range(seed, seed + count), html, json)


def _subjects(
    work: Work, there: Work, ways: list[str], num_sms: int, small: bool, arch: int
) -> list[AnySubject]:
    """All that the operator does, and on a machine of Hopper's the work `there`, by few programs
    where that is `small`; with `arch` that alone.

    Raises  UsageError: it does nothing else on `arch`
    """
    on_hopper = subjects_on_hopper(there, ways, min(num_sms, FEW_SMS) if small else num_sms)
    if not arch:
        return [*subjects_of_op(work, ways, num_sms), *on_hopper]
    if arch != HOPPER or not on_hopper:
        raise UsageError(
            f"--arch {arch}: {work.op.name} of {work.dtype} has no kernels of its own there; on"
            f" {HOPPER} products of 16 bits have (--dtype bf16)"
        )
    return [*on_hopper]


def by_slots(script: ScriptSubject, exhaustive: bool) -> Iterator[ScriptSubject]:
    """The script as it is, and on one slot: calls as few as slots show no mistake in an epoch.

    What is explored to its end is not explored twice where the number of slots changes nothing.
    """
    yield script
    if os.environ.get(SLOTS) == ONE_SLOT:
        return
    other = replace(script, slots=1)
    if not exhaustive or _events(script) != _events(other):
        yield other


def _events(script: ScriptSubject) -> list[tuple]:
    recorder, _ = observed(lambda o: script.run(observers=o))
    return [(one.kind, one.party, str(one.place), one.text) for one in recorder.events]


def _check(
    subject: str, schedules: int | None, exhaustive: bool, mutants: bool, replay: str,
    max_executions: int, max_seconds: float,
) -> None:  # fmt: skip
    if subject and replay:
        raise UsageError(f"{subject} and --replay {replay}: give one, a replay knows its subject")
    if not subject and not replay:
        raise UsageError("name an operator or a script, or give a replay with --replay FILE")
    if sum((schedules is not None, exhaustive, mutants, bool(replay))) > 1:
        raise UsageError("--schedules, --exhaustive, --mutants and --replay: one at a time")
    if schedules is not None and schedules < 1:
        raise UsageError(f"--schedules {schedules}: at least one schedule is needed")
    if max_executions < 1:
        raise UsageError(f"--max-executions {max_executions}: at least one is needed")
    if max_seconds <= 0:
        raise UsageError(f"--max-seconds {max_seconds:g}: more than no time is needed")


def _check_script(script: str, shape: str, dtype: str, calls: str) -> None:
    """What is for operators says nothing to a script."""
    given = {"--shape": shape, "--dtype": dtype if dtype != DEFAULT_DTYPE else "", "--calls": calls}
    for option, words in given.items():
        if words:
            raise UsageError(
                f"{option} {words}: {script} is a script, which knows its own sizes; give its "
                "arguments after --"
            )


def _smaller(subject: AnySubject) -> object:
    """The configuration with as few programs as the operator's card asks for; on Hopper also with
    so few stages that each is used again."""
    assert not isinstance(subject, ScriptSubject), "a script has no configuration"
    config, changes = subject.config, subject.work.op.smallest_config
    if subject.arch and hasattr(config, "num_stages"):
        changes = {**changes, "num_stages": 2}
    return replace(config, **changes) if config is not None and changes else config


def run_schedules(subjects: list[AnySubject], seeds: range, html: str, json: bool) -> int:
    """Draw schedules, the subjects in turn."""
    from weft.tools import exploring
    from weft.verify.schedules import explore

    what = subjects[0].name
    sampler = exploring.Sampler(subjects)
    first_seen: dict[tuple, int] = {}

    def remember(seed: int, finding: Finding) -> None:
        first_seen[finding.key()] = seed

    with console.bar(f"{what}: schedules", len(seeds)) as bar:
        report = explore(sampler, seeds, on_new=remember, on_schedule=lambda _: bar.advance())
    report.bound = "drawn from seeds"
    if any(isinstance(one, ScriptSubject) and one.slots for one in subjects):
        report.bound += f", every other one on one slot ({SLOTS}={ONE_SLOT})"

    def again(finding: Finding | None) -> tuple[Recorder, Report]:
        seed = seeds[0] if finding is None else first_seen[finding.key()]
        return observed(lambda o: sampler.run(seed, o))

    hints = {key: f"--seed {seed} --schedules 1" for key, seed in first_seen.items()}
    return tell(report, subjects[0], again, html, json, hints, executions=len(seeds))


def run_exhaustive(
    subjects: list[AnySubject], bounds: Bounds, save: str, html: str, json: bool
) -> int:
    """Explore all subjects; `bounds` are for all of them together."""
    from weft.tools import exploring

    what = subjects[0].name
    with console.bar(f"{what}: executions", bounds.executions) as bar:
        found = exploring.explore_all(subjects, bounds, folder=save, on_execution=bar.advance)
    for subject, one in found.searches if not json else ():
        state = "complete" if one.complete else f"stopped at {one.bound}"
        ran = counted(one.executions, "execution")
        console.notes().print(
            f"[dim]{subject.variant}: {ran} of up to {one.steps} steps in {one.seconds:.1f} s,"
            f" {one.abandoned} more given up as alike; {state}[/]"
        )
    for note in found.unwritten:
        console.notes().print(f"note: {note}", markup=False)

    def again(finding: Finding | None) -> tuple[Recorder, Report]:
        path = None if finding is None else found.replays.get(finding.key())
        if path is None:
            return observed(lambda o: subjects[0].run(observers=o))
        return replayed(path)[1:]

    hints = {key: f"weft verify --replay {path}" for key, path in found.replays.items()}
    return tell(
        found.report, subjects[0], again, html, json, hints, executions=found.executions,
        abandoned=found.abandoned, replays=list(found.replays.values()),
    )  # fmt: skip


def run_replay(path: str, html: str, json: bool) -> int:
    """Run one saved execution again, and show what it shows."""
    subject, recorder, report = replayed(path)
    return tell(report, subject, lambda _: (recorder, report), html, json, {}, executions=1)


def tell(
    report: Report, subject: AnySubject, again: Callable[[Finding | None], tuple[Recorder, Report]],
    html: str, json: bool, hints: Mapping[tuple, str], **values: Any,
) -> int:  # fmt: skip
    """The report as JSON or for people, with how each finding is seen again; pictures of what was
    found, each of a run that shows it, on a page also of a clean run; the exit code."""
    what = subject.name
    if isinstance(subject, ScriptSubject):
        say_if_idle(report)
    if json:
        console.print_json({**report.to_json(), **values, "bound": report.bound})
    elif report.ok:
        console.results().print(f"[bold green]ok[/]  {what}: {report}", markup=True)
    else:
        console.results().print(str(report), markup=False)
        for finding in report:
            if how := hints.get(finding.key()):
                where = f"{finding.kind} at {finding.first.file}:{finding.first.line}"
                console.notes().print(f"[dim]{where}: see it again with {how}[/]")
    if not json or html:
        seen = pictures.seen_again(report, again)
        if not json:
            pictures.show(seen)
        if html:
            pictures.write(html, seen or [pictures.Seen(again(None)[0], [])], report)
    return console.FINE if report.ok else console.PROBLEM


def replayed(path: str) -> tuple[AnySubject, Recorder, Report]:
    """Raises  UsageError: the file is no replay, or its source has changed since"""
    from weft.verify.exploration.execution import Diverged, Execution
    from weft.verify.exploration.replay import Scripted, read_replay

    replay = read_replay(path)
    subject = subject_of(replay.subject)
    replay.check(subject.file)
    try:
        recorder, report = observed(
            lambda o: subject.run(Execution(Scripted(replay.turns)), observers=o)
        )
    except Diverged as error:
        raise UsageError(f"{path}: this is another program than was recorded: {error}") from None
    report.bound = "the one execution of a replay"
    return subject, recorder, report


def observed(run: Callable[[list[Recorder]], Ran]) -> tuple[Recorder, Report]:
    """A run with somebody looking on."""
    from weft.emulator.observation import Recorder

    recorder = Recorder()
    return recorder, run([recorder]).report


def run_mutants(
    subject: AnySubject, work: Work | None, max_seconds: float, html: str, json: bool, *,
    dtype: str = "float32", arch: int = 0,
) -> int:  # fmt: skip
    """Every mutant of the subject; of an operator for which no `work` is chosen, in its trials of
    this dtype.

    Where the subject itself shows something, that is reported, and no mutant is tried.
    """
    from weft.tools import mutants
    from weft.verify.mutants import Bounds, ProgramFails

    bounds, what = Bounds(limit_s=max_seconds), subject.name
    try:
        with console.bar(f"{what}: mutants", before=f"{what}: looking for mutants") as bar:
            if work is not None:
                found = mutants.mutants_of_op(work, bounds, arch=arch, on_mutant=bar.reach)
            elif isinstance(subject, OpSubject):
                found = mutants.mutants_in_trials(
                    subject.work.op, bounds, dtype=dtype, arch=arch, on_mutant=bar.reach
                )
            else:
                found = mutants.mutants_of_script(
                    subject.path, subject.args, subject.topology, bounds, arch=arch,
                    on_mutant=bar.reach,
                )  # fmt: skip
    except ProgramFails as error:
        recorder, report = mutants.shown_again(error, what, subject.num_ranks)
        if not json:
            console.notes().print("[dim]no mutant was tried: put the program itself right first[/]")
        return tell(report, subject, lambda _: (recorder, report), html, json, {}, mutants=0)
    if json:
        console.print_json(found.to_json())
    else:
        console.results().print(str(found), markup=False)
    if isinstance(subject, ScriptSubject) and not found.verdicts:
        say_if_idle(observed(lambda o: subject.run(observers=o))[1])
    return console.FINE if found.ok else console.PROBLEM
