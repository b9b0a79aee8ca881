"""`weft run OP`: one operator on many ranks against its reference."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from weft.base.errors import FindingError, UsageError
from weft.tools import console
from weft.tools.check import Step, Work, check_emulated, check_on_gpus
from weft.tools.words import find_op, op_dtype, parse_shape, parse_topology, shape_text

TARGETS = ("auto", "cuda", "emu")


def run(
    op: Annotated[str, typer.Argument(metavar="OP", help="an operator, e.g. ag_gemm")],
    ranks: Annotated[
        int | None, typer.Option(help="how many; 4, or what --nodes holds", show_default=False)
    ] = None,
    nodes: Annotated[str, typer.Option(help="scale-up domains: 2, or their sizes, 3+1")] = "1",
    target: Annotated[str, typer.Option(help="auto, cuda or emu")] = "auto",
    shape: Annotated[str, typer.Option(help="m=..,n=..,k=..: m global, n and k per rank")] = "",
    dtype: Annotated[str, typer.Option(help="torch's names, or fp16, bf16, fp32")] = "bf16",
    seed: Annotated[int, typer.Option(help="of the inputs and, on emu, of the schedule")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Run an operator against its reference: eager, replayed, another shape, eager again."""
    topology = parse_topology(ranks, nodes)
    ranks = topology.num_ranks
    card = find_op(op)
    sizes = parse_shape(shape, card.default_shape)
    work = Work(card, ranks, sizes, op_dtype(card, dtype).name, topology.sizes)
    where = choose_target(target, ranks)
    values = {
        "op": op,
        "target": where,
        "ranks": ranks,
        "shape": sizes,
        "dtype": work.dtype,
        "ok": False,
        "rel_err": None,
        "tolerance": work.tolerance(),
        "seconds": None,
    }
    start = time.perf_counter()
    steps: list[Step] = []
    try:
        steps = (
            check_on_gpus(work, seed=seed) if where == "cuda" else check_emulated(work, seed=seed)
        )
        values["rel_err"] = worst(steps)
        values["ok"] = all(step.ok for step in steps)
    except FindingError as error:
        values["error"] = str(error)
    values["seconds"] = round(time.perf_counter() - start, 3)
    if json:
        console.print_json(values)
    else:
        show(values, steps)
    return console.FINE if values["ok"] else console.PROBLEM


def worst(steps: list[Step]) -> float | None:
    """The largest error; None where an answer had the wrong shape or a NaN in it."""
    error = max(step.rel_err for step in steps)
    return error if error != float("inf") else None


def choose_target(target: str, ranks: int) -> str:
    """`auto` takes GPUs where there is one for each rank, else the emulator."""
    if target not in TARGETS:
        raise UsageError(f"--target {target!r}: one of {', '.join(TARGETS)}")
    if target == "emu":
        return "emu"
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if target == "auto":
        return "cuda" if there >= ranks else "emu"
    if there < ranks:
        raise UsageError(
            f"--target cuda: {ranks} ranks need {ranks} GPUs, {there} here; "
            "use --target emu, or fewer ranks"
        )
    return "cuda"


def show(values: dict, steps: list[Step]) -> None:
    out = console.results()
    out.print(
        f"{values['op']} on {values['ranks']} ranks, {values['target']}, "
        f"{shape_text(values['shape'])}, {values['dtype']}: "
        + ("[bold green]ok[/]" if values["ok"] else "[bold red]wrong[/]")
        + f"  ({values['seconds']} s)"
    )
    if steps:
        rows = [
            (
                step.name,
                shape_text(step.work.shape),
                f"{step.rel_err:.2e}",
                f"{step.work.tolerance():.2e}",
                "ok" if step.ok else "WRONG",
            )
            for step in steps
        ]
        console.print_table(rows, "call", "shape", "rel err", "allowed", "")
    if "error" in values:
        out.print(values["error"], markup=False)
