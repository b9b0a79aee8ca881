"""`weft timeline` and `weft trace`: who does what when on all ranks, as a picture or a trace."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.schedule import Schedule
from weft.ir.choice import Choice
from weft.tools import console, options
from weft.tools.explain import subject_in_file, subject_of
from weft.tools.words import is_file, shape_text

if TYPE_CHECKING:
    from weft.tools.check import Work
    from weft.tools.explanation import Subject

RAN = (
    "What happened on the emulator under schedule {seed}, in simulated time of {hw}. Use it to"
    " compare plans: it does not predict the times of a GPU."
)
PLANNED = (
    "Predicted from the plan before anything runs, by the compiler’s cost model for {hw}."
    " weft explain says why it is this plan."
)
QUEUED = "One persistent kernel on each rank: its queues ({how}) by the cost model for {hw}."
TRACED = (
    "What the kernels’ programs wrote down of their tiles, on {where}. A row is a program; ranks’"
    " clocks differ by no more than {error:.1f} µs once they are put on one. What data moves"
    " elsewhere, and what comes before a rank’s first tile and after its last, is not in it."
)

Output = Annotated[
    str,
    options.option(
        "FILE", "what to write: a page (.html), or a trace for Perfetto (.json)", "-o", "--output"
    ),
]
AsTasks = Annotated[
    str,
    options.option(
        "SCHEDULE",
        "draw it as one persistent kernel, whose queues are balanced, round_robin or dynamic",
        "--persistent",
    ),
]


def timeline(
    subject: options.ProgramWord,
    output: Output,
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = "bf16",
    run: Annotated[bool, options.flag("draw a run on the emulator, not the plan", "--run")] = False,
    traced: Annotated[
        bool,
        options.flag(
            "draw what each tile of a run says of itself: on GPUs where there are enough, else"
            " or with --target emu on the emulator",
            "--traced",
        ),
    ] = False,
    transport: options.Transport = "",
    as_tasks: AsTasks = "",
    target: Annotated[
        str, options.option("TARGET", "what the plan is for, e.g. hip:gfx942", "--target")
    ] = "cuda:90",
    hw: options.Machine = "h200x4",
    seed: options.Seed = 0,
    num_sms: options.NumSms = 132,
    json: options.AsJson = False,
) -> int:
    """Draw the schedule of all ranks and engines as an HTML page, or write it as a trace.

    It is predicted from the plan, before anything runs; with --run it is what happened on the
    emulator, in simulated time. With --traced the kernels themselves write down when each of their
    tiles waited and worked, on GPUs as on the emulator.
    """
    from weft.base.hardware import find_hardware
    from weft.tools.schedule import chart_of, writing
    from weft.tools.schedule.page import HEAD, cells

    writing.check_path(output, "-o")
    find_hardware(hw)
    if traced and (is_file(subject) or run or as_tasks):
        message = "it is a way to run an operator; leave out --run and --persistent"
        raise UsageError(f"--traced {subject}: {message}")
    if traced:
        return _traced(
            subject, output, ranks, nodes, shape, dtype, transport, target, hw, seed, num_sms, json
        )
    work, settled = None, None
    if not is_file(subject):
        work = options.work_of(subject, ranks, nodes, shape, dtype)
        settled = None if run or transport else subject_of(work, target, hw)
    elif transport:
        raise UsageError(f"--transport {transport}: it is for operators; {subject} is a program")
    else:
        settled = subject_in_file(subject, ranks, nodes, shape, target, hw)
    if as_tasks and (settled is None or run):
        message = "its tasks are those of a program, before anything runs"
        raise UsageError(f"--persistent {as_tasks}: {message}; leave out --run and --transport")
    if settled is not None:
        name, num_ranks = settled.program.name, settled.facts.num_ranks
        if as_tasks:
            found, notes = queued(settled, as_tasks, num_sms)
        elif run:
            found, notes = program_ran(settled, hw, seed, num_sms)
        else:
            found, notes = predicted(settled)
    else:
        assert work is not None
        name, num_ranks = work.op.name, work.num_ranks
        found, notes = ran(work, transport, hw, seed, num_sms)
    chart = chart_of(found.spans, found.signals)
    writing.write(output, chart, f"{name} on {counted(num_ranks, 'rank')}", notes)
    if json:
        totals = [asdict(one) for one in chart.totals]
        words = {"op": name, "ranks": num_ranks} if work is None else options.words_of(work)
        words |= {"from": "run" if run or settled is None else "plan", "file": output}
        console.print_json({**words, "end_us": chart.end_us, "totals": totals})
    else:
        console.print_table([cells(one) for one in chart.totals], *HEAD)
    console.notes().print(f"[dim]schedule in {output}: {writing.how_to_open(output)}[/]")
    return console.FINE


def _traced(
    op: str, output: str, ranks: int | None, nodes: str, shape: str, dtype: str, transport: str,
    target: str, hw: str, seed: int, num_sms: int, json: bool,
) -> int:  # fmt: skip
    """Run the operator where its tiles say what they do, and show that."""
    from weft.tools.run import choose_target
    from weft.tools.schedule import traced, writing
    from weft.tools.schedule.runs import notes_of

    asked = target if target in ("cuda", "emu") else "auto"
    ranks, where, why = choose_target(asked, ranks, nodes)
    work = options.work_of(op, ranks, nodes, shape, dtype)
    console.notes().print(f"on {'GPUs' if where == 'cuda' else 'the emulator'}: {why}")
    if where == "cuda":
        found, place = traced.traced_on_gpus(work, transport, seed=seed), "GPUs"
    else:
        found = traced.traced_emulated(work, transport, hw, seed=seed, num_sms=num_sms)
        place = f"the emulator, in simulated time of {hw}"
    error_us = max(one.error_ns for one in found.clocks) / 1e3
    notes = [*notes_of(work, None), TRACED.format(where=place, error=error_us)]
    chart = traced.drawn(found)
    title = f"{work.op.name} on {counted(work.num_ranks, 'rank')}, tile by tile"
    writing.write(output, chart, title, notes)
    if json:
        words = {**options.words_of(work), "from": "trace", "file": output}
        console.print_json({**words, "end_us": chart.end_us, **found.to_json()})
    else:
        console.print_table([traced.as_words(one) for one in found.figures], *traced.HEAD)
    console.notes().print(f"[dim]schedule in {output}: {writing.how_to_open(output)}[/]")
    return console.FINE


def predicted(subject: Subject) -> tuple[Schedule, list[str]]:
    """The schedule of a plan before anything runs, and what to say of it."""
    facts = subject.facts
    call = f"{shape_text(facts.sizes)}, {counted(facts.num_ranks, 'rank')}, {facts.target}"
    taken = [f"{one.subject}: {one.taken}" for one in subject.plan.of(Choice)
             if one.what == "engine"]  # fmt: skip
    return subject.schedule, ["; ".join([call, *taken]), PLANNED.format(hw=subject.machine.name)]


def queued(subject: Subject, how: str, num_workers: int) -> tuple[Schedule, list[str]]:
    """The schedule of a program as one kernel, and what to say of it."""
    from weft.compiler.passes.place import place
    from weft.compiler.passes.tile import tile
    from weft.megakernel.extents import chosen
    from weft.megakernel.graph import build
    from weft.megakernel.schedule import schedule
    from weft.tools.schedule.from_tasks import played

    facts, machine, compiled = subject.facts, subject.machine, subject.compiled
    program = compiled.tiled if compiled is not None else tile(place(subject.program))
    settled = compiled.settings.tiles if compiled is not None else ()
    program = chosen(program, facts.sizes, facts.num_ranks, num_workers, settled, machine)
    graph = build(program, facts.sizes, facts.num_ranks)
    found = played(schedule(graph, how, num_workers, machine), machine)
    workers = f"{counted(num_workers, 'worker')} on each"
    call = f"{shape_text(facts.sizes)}, {counted(facts.num_ranks, 'rank')}, {workers}"
    tasks, counters = len(graph.ranks[0].tasks), len(graph.ranks[0].counters)
    counts = f"{counted(tasks, 'task')}, {counted(counters, 'counter')} on rank 0"
    return found, [f"{call}: {counts}", QUEUED.format(how=how, hw=machine.name)]


def program_ran(subject: Subject, hw: str, seed: int, num_sms: int) -> tuple[Schedule, list[str]]:
    """The schedule of a user's program on the emulator, and what to say of it."""
    from weft.tools.schedule.runs import timed_program

    assert subject.compiled is not None
    facts = subject.facts
    found = timed_program(subject.compiled, facts, hw, seed=seed, num_sms=num_sms)
    call = f"{shape_text(facts.sizes)}, {counted(facts.num_ranks, 'rank')}"
    return Schedule([*found], found.signals), [call, RAN.format(hw=hw, seed=seed)]


def ran(work: Work, transport: str, hw: str, seed: int, num_sms: int) -> tuple[Schedule, list[str]]:
    """The schedule of a call on the emulator, and what to say of it."""
    from weft.tools.schedule.runs import config_for, notes_of, timed_call

    config = config_for(work, transport)
    found = timed_call(work, config, hw, seed=seed, num_sms=num_sms)
    notes = [*notes_of(work, config), RAN.format(hw=hw, seed=seed)]
    return Schedule([*found], found.signals), notes


def trace(
    op: options.OpWord,
    output: Annotated[str, options.option("FILE.json", "the trace to write", "-o", "--output")],
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = "bf16",
    transport: options.Transport = "",
    hw: options.Machine = "h200x4",
    seed: options.Seed = 0,
    num_sms: options.NumSms = 132,
    json: options.AsJson = False,
) -> int:
    """Run an operator on the emulator and write a trace of it, in simulated time, for Perfetto."""
    from weft.base.hardware import find_hardware
    from weft.tools.schedule import writing
    from weft.tools.schedule.runs import config_for, timed_call

    writing.check_path(output, "-o", writing.TRACES)
    find_hardware(hw)
    work = options.work_of(op, ranks, nodes, shape, dtype)
    found = timed_call(work, config_for(work, transport), hw, seed=seed, num_sms=num_sms)
    found.write(output)
    summary = found.summary()
    if json:
        lines = [asdict(line) for line in summary]
        console.print_json({**options.words_of(work), "file": output, "timeline": lines})
    else:
        for line in summary:
            console.results().print(str(line), markup=False)
    console.notes().print(f"[dim]trace in {output}: open it at https://ui.perfetto.dev[/]")
    return console.FINE
