"""`weft timeline` and `weft trace`: who does what when on all ranks, predicted and measured, as a
trace for Perfetto."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.schedule import Schedule
from weft.ir.choice import Choice
from weft.tools import console, options
from weft.tools.explain import subject_in_file, subject_of
from weft.tools.run import choose_target
from weft.tools.words import is_file, parse_shape, parse_topology, shape_text

if TYPE_CHECKING:
    from weft.tools.check import Work
    from weft.tools.explanation import Subject

PLANNED = (
    "Predicted from the plan before anything runs, by the compiler’s cost model for {hw}."
    " weft explain says why it is this plan."
)
TRACED = (
    "What the kernels’ programs wrote down of their tiles, on GPUs. A row is a program; ranks’"
    " clocks differ by no more than {error:.1f} µs once they are put on one. What data moves"
    " elsewhere, and what comes before a rank’s first tile and after its last, is not in it."
)

Output = Annotated[
    str, options.option("FILE.json", "the trace for Perfetto to write", "-o", "--output")
]


def timeline(
    subject: options.ProgramWord,
    output: Output,
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = "",
    target: options.PlanTarget = "cuda:90",
    hw: options.Machine = "h200x4",
    json: options.AsJson = False,
) -> int:
    """Write the schedule of all ranks and engines as a trace for Perfetto; print its totals.

    It is predicted from the plan, before anything runs; weft trace measures one. `weft timeline
    pipeline` is the schedule of a model in stages, and its bubble.
    """
    from weft.tools.schedule import chart, piped

    chart.check_path(output, "-o")
    if subject == piped.NAME:
        return _of_stages(parse_topology(ranks, nodes).num_ranks, shape, hw, output, json)
    if is_file(subject):
        settled = subject_in_file(subject, ranks, nodes, shape, target, hw)
        words = {"op": settled.program.name, "ranks": settled.facts.num_ranks}
    else:
        work = options.work_of(subject, ranks, nodes, shape, dtype, as_in_models=True)
        words, settled = options.words_of(work), subject_of(work, target, hw)
    if settled is None:
        raise UsageError(
            f"{subject} is a kernel written by hand: there is no plan to draw; weft verify"
            f" {subject} --html shows who waits for whom, weft bench {subject} its times"
        )
    found, notes = predicted(settled)
    return _write(words, "plan", found, notes, output, json)


def trace(
    subject: options.OpWord,
    output: Output,
    ranks: options.Ranks = None,
    shape: options.Shape = "",
    dtype: options.Dtype = "",
    transport: options.Transport = "",
    seed: options.Seed = 0,
    json: options.AsJson = False,
) -> int:
    """Run an operator on GPUs and write when its kernels' tiles waited and worked, for Perfetto.

    Each tile writes it down itself; weft timeline predicts a schedule without GPUs.
    """
    from weft.tools.schedule import chart

    chart.check_path(output, "-o")
    ranks, _, why = choose_target(
        "cuda", ranks, "1", asks="weft trace",
        instead=f"use weft timeline {subject}, which predicts without GPUs",
    )  # fmt: skip
    console.notes().print(f"on GPUs: {why}")
    work = options.work_of(subject, ranks, "1", shape, dtype)
    found, notes = tiles_of(work, transport, seed)
    return _write(options.words_of(work), "trace", found, notes, output, json)


def _write(
    words: dict[str, Any], what: str, found: Schedule, notes: list[str], output: str, json: bool
) -> int:
    """The file, and its totals on the terminal."""
    from weft.tools.schedule import chart

    made = chart.chart_of(found.spans, found.signals)
    chart.write(output, made, f"{words['op']} on {counted(words['ranks'], 'rank')}", notes)
    if json:
        totals = [asdict(one) for one in made.totals]
        values = {**words, "from": what, "file": output, "end_us": made.end_us, "totals": totals}
        console.print_json(values)
    else:
        console.print_table([one.as_words() for one in made.totals], *chart.HEAD)
    console.notes().print(f"[dim]schedule in {output}: {chart.HOW_TO_OPEN}[/]")
    return console.FINE


def _of_stages(num_ranks: int, shape: str, hw: str, output: str, json: bool) -> int:
    """A step of a pipeline: the file, how long each rank waits, and the bubble."""
    from weft.base.machines import find_machine
    from weft.tools.schedule import chart, piped

    sizes = parse_shape(shape, piped.SIZES)
    found = piped.played(num_ranks, sizes, find_machine(hw))
    made = chart.chart_of(found.schedule.spans, found.schedule.signals)
    title = f"{piped.NAME} on {counted(num_ranks, 'rank')}"
    chart.write(output, made, title, [shape_text(sizes), found.note, found.bubble])
    if json:
        words = {"op": piped.NAME, "ranks": num_ranks, "shape": sizes, "from": "turns"}
        console.print_json({**words, "file": output, **found.values})
    else:
        console.print_table([one.as_words() for one in found.totals], *piped.HEAD)
        console.results().print(found.bubble, highlight=False)
    console.notes().print(f"[dim]schedule in {output}: {chart.HOW_TO_OPEN}[/]")
    return console.FINE


def tiles_of(work: Work, transport: str, seed: int) -> tuple[Schedule, list[str]]:
    """What the tiles of a call say of themselves, and what to say of it."""
    from weft.tools.schedule import traced

    found = traced.traced_on_gpus(work, transport, seed=seed)
    error_us = max(one.error_ns for one in found.clocks) / 1e3
    call = f"{shape_text(work.shape)}, {work.dtype}, {counted(work.num_ranks, 'rank')}"
    notes = [call, TRACED.format(error=error_us)]
    return Schedule(traced.spans_of(found.tiles), ()), notes


def predicted(subject: Subject) -> tuple[Schedule, list[str]]:
    """The schedule of a plan before anything runs, and what to say of it."""
    facts = subject.facts
    call = f"{shape_text(facts.sizes)}, {counted(facts.num_ranks, 'rank')}, {facts.target}"
    taken = [f"{one.subject}: {one.taken}" for one in subject.plan.of(Choice)
             if one.what == "engine"]  # fmt: skip
    return subject.schedule, ["; ".join([call, *taken]), PLANNED.format(hw=subject.machine.name)]
