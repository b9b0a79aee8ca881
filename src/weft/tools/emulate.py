"""`weft emulate SCRIPT.py`: a user's SPMD script on emulated ranks, with all checks."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, TextIO

import typer

from weft.base.report import Report
from weft.tools import console
from weft.tools.words import find_script, parse_ranks


def emulate(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="an SPMD script")],
    ranks: Annotated[int, typer.Option(help="how many ranks run it")] = 4,
    nodes: Annotated[int, typer.Option(help="scale-up domains the ranks are spread over")] = 1,
    seed: Annotated[int, typer.Option(help="of the schedule: same seed, same run")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> int:
    """Run a script on emulated ranks; the script's own arguments follow `--`."""
    parse_ranks(ranks, nodes)
    path = find_script(script)
    args = context.meta.get("script_args", [])
    said_to = sys.stderr if json else None
    report = run_script_once(str(path), args, ranks, nodes, seed, said_to)
    if json:
        console.print_json({**report.to_json(), "nodes": nodes, "seed": seed})
    else:
        show(report, seed)
    return console.FINE if report.ok else console.PROBLEM


def run_script_once(
    path: str, args: list[str], ranks: int, nodes: int, seed: int, said_to: TextIO | None = None
) -> Report:
    """The script under one schedule; what it prints goes to `said_to`, or to stdout."""
    from weft.emulator.script import run_script

    with contextlib.redirect_stdout(said_to) if said_to else contextlib.nullcontext():
        return run_script(path, args, ranks=ranks, nodes=nodes, seed=seed)


def show(report: Report, seed: int) -> None:
    notes = console.notes()
    if report.ok:
        notes.print(
            f"[green]{report.op} on {report.ranks} ranks, schedule {seed}: nothing found[/]"
        )
        return
    console.results().print(str(report), markup=False)
    notes.print(f"[dim]the same run again: --seed {seed}[/]")
