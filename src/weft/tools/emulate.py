"""`weft emulate SCRIPT.py`: a user's SPMD script on emulated ranks, with all checks."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from weft.base.counts import counted
from weft.base.report import Report
from weft.base.topology import Topology
from weft.tools import console, options, pictures
from weft.tools.words import find_script, parse_topology

if TYPE_CHECKING:
    from weft.emulator.timeline import Timeline


def emulate(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py", help="a script that torchrun could start on each rank",
            autocompletion=options.complete_file,
        ),
    ],
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="picks the schedule: same seed, same run")
    ] = 0,
    num_sms: options.NumSms = 132,
    timeline: Annotated[
        str,
        typer.Option(
            metavar="FILE", show_default=False,
            help="also write the run in simulated time: a page (.html) or a Perfetto trace (.json)",
        ),
    ] = "",
    hw: options.Machine = "h200x4",
    html: options.Html = "",
    json: options.AsJson = False,
) -> int:  # fmt: skip
    """Run a script on emulated ranks; report races, deadlocks and other mistakes.

    Every rank runs the whole script, under one schedule; weft verify tries many. The script's own
    arguments follow `--`.
    """
    from weft.emulator.observation import Recorder
    from weft.tools.schedule import writing

    topology = parse_topology(ranks, nodes)
    path = find_script(script)
    args = context.meta.get("script_args", [])
    said_to = sys.stderr if json else None
    timelines: list[Timeline] = []
    writing.check_path(timeline, "--timeline")
    pictures.check_path(html)
    recorder = Recorder()
    report = run_script_once(
        str(path), args, topology, seed, said_to, num_sms,
        hardware=hw if timeline else None,
        at_end=lambda session: timelines.append(session.timeline) if timeline else None,
        observers=[recorder],
    )  # fmt: skip
    seen = [pictures.Seen(recorder, report.findings)]
    values = {**report.to_json(), "nodes": topology.num_nodes, "seed": seed}
    for found in timelines:
        title = f"{report.op} on {counted(report.ranks, 'rank')}"
        write_timeline(found, timeline, title, seed, hw)
        values["timeline"] = [asdict(line) for line in found.summary()]
    if json:
        console.print_json(values)
    else:
        show(report, seed)
        pictures.show(seen)
        for found in timelines:
            show_timeline(found, timeline)
    if html:
        pictures.write(html, seen, report)
    return console.FINE if report.ok else console.PROBLEM


def run_script_once(
    path: str, args: list[str], topology: Topology, seed: int, said_to: TextIO | None = None,
    num_sms: int = 132, **options: Any,
) -> Report:  # fmt: skip
    """The script under one schedule; what it prints goes to `said_to`, or to stdout."""
    from weft.emulator.script import run_script

    with contextlib.redirect_stdout(said_to) if said_to else contextlib.nullcontext():
        return run_script(path, args, nodes=topology.sizes, seed=seed, num_sms=num_sms, **options)


def write_timeline(timeline: Timeline, path: str, title: str, seed: int, hw: str) -> None:
    """As a page, or as a trace for Perfetto; the file's name says which."""
    from weft.tools.schedule import chart_of, writing
    from weft.tools.timeline import RAN

    if not writing.is_page(path):
        timeline.write(path)
        return
    writing.write(path, chart_of(timeline, timeline.signals), title, [RAN.format(seed=seed, hw=hw)])


def show_timeline(timeline: Timeline, path: str) -> None:
    from weft.tools.schedule import writing

    out = console.results()
    for line in timeline.summary():
        out.print(str(line), markup=False, highlight=False)
    console.notes().print(f"[dim]simulated time in {path}: {writing.how_to_open(path)}[/]")


def show(report: Report, seed: int) -> None:
    notes = console.notes()
    if report.ok:
        title = f"{report.op} on {counted(report.ranks, 'rank')}"
        notes.print(f"[green]{title}, schedule {seed}: nothing found[/]")
        return
    console.results().print(str(report), markup=False)
    notes.print(f"[dim]the same run again: --seed {seed}[/]")
