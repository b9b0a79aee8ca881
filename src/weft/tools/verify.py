"""`weft verify OP` or `weft verify SCRIPT.py`: what many schedules show."""

from __future__ import annotations

import io
from functools import partial
from typing import Annotated

import typer

from weft.base.errors import UsageError
from weft.base.report import Finding, Report
from weft.base.topology import Topology
from weft.tools import console
from weft.tools.check import Work, one_schedule
from weft.tools.emulate import run_script_once
from weft.tools.words import (
    find_op,
    find_script,
    is_script,
    op_dtype,
    parse_shape,
    parse_topology,
    shape_text,
)


def verify(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="OP|SCRIPT.py")],
    ranks: Annotated[
        int | None, typer.Option(help="how many; 4, or what --nodes holds", show_default=False)
    ] = None,
    nodes: Annotated[str, typer.Option(help="scale-up domains: 2, or their sizes, 3+1")] = "1",
    schedules: Annotated[int, typer.Option(help="how many schedules to run")] = 20,
    seed: Annotated[int, typer.Option(help="the first schedule's seed")] = 0,
    shape: Annotated[str, typer.Option(help="an operator's sizes, m=..,n=..,k=..")] = "",
    dtype: Annotated[str, typer.Option(help="an operator's dtype")] = "fp32",
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Look for races and deadlocks under many schedules."""
    topology = parse_topology(ranks, nodes)
    if schedules < 1:
        raise UsageError(f"--schedules {schedules}: at least one schedule is needed")
    if is_script(subject):
        path, args = str(find_script(subject)), context.meta.get("script_args", [])
        what, run = path, lambda s: once_unheard(path, args, topology, s)
    else:
        card = find_op(subject)
        sizes = parse_shape(shape, card.default_shape)
        name = op_dtype(card, dtype).name
        work = Work(card, topology.num_ranks, sizes, name, topology.sizes)
        what = f"{subject} {shape_text(sizes)} {work.dtype}"
        run = partial(one_schedule, work)
    report, first_seen = explore_with_bar(run, range(seed, seed + schedules), what)
    if json:
        console.print_json(report.to_json())
    else:
        show(report, what, first_seen)
    return console.FINE if report.ok else console.PROBLEM


def once_unheard(path: str, args: list[str], topology: Topology, seed: int) -> Report:
    """The script under one schedule; what it says is the same every time, and not shown."""
    return run_script_once(path, args, topology, seed, said_to=io.StringIO())


def explore_with_bar(run, seeds: range, what: str) -> tuple[Report, dict[tuple, int]]:
    """The exploration's report, and the seed under which each finding was first seen."""
    from weft.verify.schedules import explore

    first_seen: dict[tuple, int] = {}

    def remember(seed: int, finding: Finding) -> None:
        first_seen[finding.key()] = seed

    with console.bar(f"{what}: schedules", len(seeds)) as bar:
        report = explore(run, seeds, on_new=remember, on_schedule=lambda _: bar.advance())
    return report, first_seen


def show(report: Report, what: str, first_seen: dict[tuple, int]) -> None:
    out = console.results()
    if report.ok:
        out.print(f"[bold green]ok[/]  {what}: {report}", markup=True)
        return
    out.print(str(report), markup=False)
    for finding in report:
        where = finding.first
        console.notes().print(
            f"[dim]{finding.kind} at {where.file}:{where.line}: "
            f"see it again with --seed {first_seen[finding.key()]} --schedules 1[/]"
        )
