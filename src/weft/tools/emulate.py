"""`weft emulate SCRIPT.py`: a user's SPMD script on emulated ranks, with all checks."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, TextIO

import typer

from weft.base.report import Report
from weft.base.topology import Topology
from weft.tools import console
from weft.tools.words import find_script, parse_topology


def emulate(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="an SPMD script")],
    ranks: Annotated[
        int | None, typer.Option(help="how many; 4, or what --nodes holds", show_default=False)
    ] = None,
    nodes: Annotated[str, typer.Option(help="scale-up domains: 2, or their sizes, 3+1")] = "1",
    seed: Annotated[int, typer.Option(help="of the schedule: same seed, same run")] = 0,
    num_sms: Annotated[int, typer.Option(help="programs resident on one rank")] = 132,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> int:
    """Run a script on emulated ranks; the script's own arguments follow `--`."""
    topology = parse_topology(ranks, nodes)
    path = find_script(script)
    args = context.meta.get("script_args", [])
    said_to = sys.stderr if json else None
    report = run_script_once(str(path), args, topology, seed, said_to, num_sms)
    if json:
        console.print_json({**report.to_json(), "nodes": topology.num_nodes, "seed": seed})
    else:
        show(report, seed)
    return console.FINE if report.ok else console.PROBLEM


def run_script_once(
    path: str, args: list[str], topology: Topology, seed: int, said_to: TextIO | None = None,
    num_sms: int = 132,
) -> Report:  # fmt: skip
    """The script under one schedule; what it prints goes to `said_to`, or to stdout."""
    from weft.emulator.script import run_script

    with contextlib.redirect_stdout(said_to) if said_to else contextlib.nullcontext():
        return run_script(path, args, nodes=topology.sizes, seed=seed, num_sms=num_sms)


def show(report: Report, seed: int) -> None:
    notes = console.notes()
    if report.ok:
        notes.print(
            f"[green]{report.op} on {report.ranks} ranks, schedule {seed}: nothing found[/]"
        )
        return
    console.results().print(str(report), markup=False)
    notes.print(f"[dim]the same run again: --seed {seed}[/]")
