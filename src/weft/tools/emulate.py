"""`weft emulate SCRIPT.py`: a user's SPMD script on emulated ranks, with all checks."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any, TextIO

import typer

from weft.base.counts import counted
from weft.base.report import Report
from weft.base.topology import Topology
from weft.tools import console, options, pictures
from weft.tools.words import find_script, parse_topology


def emulate(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py",
            help="a script that torchrun could start on each rank",
            autocompletion=options.complete_file,
        ),
    ],
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    seed: Annotated[int, options.option("N", "picks the schedule: same seed, same run", min=0)] = 0,
    num_sms: options.NumSms = 132,
    arch: options.Arch = 0,
    html: options.Html = "",
    json: options.AsJson = False,
) -> int:
    """Run a script on emulated ranks; report races, deadlocks and other mistakes.

    Every rank runs the whole script, under one schedule; weft verify tries many. The script's own
    arguments follow `--`.
    """
    from weft.emulator.observation import Recorder

    topology = parse_topology(ranks, nodes)
    path = find_script(script)
    args = context.meta.get("script_args", [])
    said_to = sys.stderr if json else None
    pictures.check_path(html)
    recorder = Recorder()
    report = run_script_once(
        str(path), args, topology, seed, said_to, num_sms, arch=arch, observers=[recorder]
    )
    seen = [pictures.Seen(recorder, report.findings)]
    values = {**report.to_json(), "nodes": topology.num_nodes, "seed": seed}
    if json:
        console.print_json(values)
    else:
        show(report, seed)
        pictures.show(seen)
    say_if_idle(report)
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


def show(report: Report, seed: int) -> None:
    notes = console.notes()
    if report.ok:
        title = f"{report.op} on {counted(report.ranks, 'rank')}"
        notes.print(f"[green]{title}, schedule {seed}: nothing found[/]")
        return
    console.results().print(str(report), markup=False)
    notes.print(f"[dim]the same run again: --seed {seed}[/]")


def say_if_idle(report: Report) -> None:
    """That nothing was found says little where no kernel ran."""
    if report.ok and not report.launches:
        console.notes().print("note: no kernel was launched")
