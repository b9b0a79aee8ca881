"""`weft compile OP`: an operator's kernels for GPUs that need not be here."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.base.records import PLAN_FORMAT
from weft.base.target import Target
from weft.tools import console, options
from weft.tools.binaries import Binary, build
from weft.tools.words import find_op, op_dtype, parse_ranks, parse_shape, parse_targets


def compile_op(
    op: options.OpWord,
    target: Annotated[
        str,
        typer.Option(
            metavar="TARGETS",
            help="some of cuda:80,cuda:90,cuda:100,hip:gfx942,hip:gfx950",
        ),
    ],
    ranks: Annotated[int, typer.Option(metavar="N", help="number of ranks")] = 4,
    shape: options.Shape = "",
    dtype: options.Dtype = "bf16",
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FOLDER", show_default=False,
            help="write the binaries and a plan of their launches here",
        ),
    ] = "",
    json: options.AsJson = False,
) -> int:  # fmt: skip
    """Compile an operator ahead of time and check the compiled code; no GPU is needed.

    The check reads TTGIR and assembly: no wait is lost, no load that a wait guards is above it.
    """
    parse_ranks(ranks)
    card = find_op(op)
    targets = parse_targets(target)
    problem = card.make_problem(
        ranks, parse_shape(shape, card.default_shape), op_dtype(card, dtype).name
    )
    if output:
        make_folder(output)
    binaries, complaints = [], []
    with console.bar("compiling", len(targets)) as bar:
        for one in targets:
            built, found = compile_for(card, problem, one)
            binaries += built
            complaints += found
            bar.advance()
    if output:
        write(binaries, output, op)
    values = {
        "op": op,
        "kernels": [binary.to_json() for binary in binaries],
        "ok": not complaints,
    }
    if complaints:
        values["findings"] = complaints
    console.print_json(values) if json else show(values, output)
    return console.FINE if values["ok"] else console.PROBLEM


def compile_for(card: Op, problem: object, target: Target) -> tuple[list[Binary], list[str]]:
    """Every kernel of the operator for one target, and what the post-compile check found."""
    from weft.verify.compiled import compiled

    # The best that has kernels: where libraries alone are faster, there is nothing to compile.
    built = (list(card.kernels(problem, one, target)) for one in card.candidates(problem, target))
    kernels = next(filter(None, built), None)
    if kernels is None:
        raise UsageError(f"{card.name} has no configuration for {target} at {problem}")
    binaries, complaints = [], []
    for fn, record in kernels:
        binaries.append(build(fn, record, target))
        complaints += [str(finding) for finding in compiled(fn, target, record).findings]
    return binaries, complaints


def make_folder(output: str) -> None:
    """Before the work and not behind it.

    Raises  UsageError: it cannot be made
    """
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {output}: no folder can be made there: {error.strerror}") from error


def write(binaries: list[Binary], output: str, op: str) -> None:
    """The binaries with a plan beside them that says how each is launched."""
    folder = Path(output)
    kernels = [binary.write(folder) for binary in binaries]
    plan = {"format": PLAN_FORMAT, "op": op, "kernels": kernels}
    text = json_text.dumps(plan, indent=2, default=str)
    (folder / "plan.json").write_text(text + "\n")


def show(values: dict, output: str) -> None:
    out = console.results()
    rows = [
        (
            kernel["name"],
            kernel["target"],
            kernel["format"],
            f"{kernel['bytes']:,}",
            "-" if kernel["registers"] is None else str(kernel["registers"]),
            f"{kernel['shared_bytes']:,}",
        )
        for kernel in values["kernels"]
    ]
    console.print_table(rows, "kernel", "target", "format", "bytes", "registers", "shared bytes")
    for finding in values.get("findings", ()):
        out.print(finding, markup=False)
    verdict = "[bold green]ok[/]" if values["ok"] else "[bold red]the check found a problem[/]"
    out.print(f"{values['op']}: {verdict}" + (f", written to {output}" if output else ""))
