"""`weft run OP`: one operator or tensor program on many ranks against its reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from weft.base.counts import counted
from weft.base.errors import FindingError, UsageError
from weft.base.settings import Settings
from weft.base.topology import parse_nodes
from weft.manycore.record import NAME as MANYCORE
from weft.manycore.record import is_manycore
from weft.tools import console, options
from weft.tools.check import Step, check_emulated, check_on_gpus
from weft.tools.words import shape_text

TARGETS = ("auto", "cuda", "emu")
Anywhere = Annotated[
    str,
    options.option(
        "auto|cuda|emu|manycore",
        "where to run; auto takes GPUs where there are enough, else the emulator; manycore is C "
        "for cores with scratchpads, e.g. manycore:sw26010",
    ),
]
PLACES = {"cuda": "GPUs", "emu": "emulator"}


def run(
    op: options.ProgramWord,
    ranks: options.RanksAnywhere = None,
    nodes: options.Nodes = "1",
    target: Anywhere = "auto",
    shape: options.Shape = "",
    dtype: options.Dtype = "",
    seed: options.Seed = 0,
    json: options.AsJson = False,
) -> int:
    """Run an operator or a tensor program and compare its results with its reference.

    It is called eagerly, recorded and replayed three times, called with another shape, and called
    eagerly again. On a many-core machine, which is simulated, once.
    """
    if is_manycore(target):
        from weft.tools import many_cores

        return many_cores.run(op, ranks, nodes, target, shape, dtype, seed, json)
    ranks, where, why = choose_target(target, ranks, nodes, others=[MANYCORE])
    work = options.work_of(op, ranks, nodes, shape, dtype)
    work.check_memory()
    if target != where:
        console.notes().print(f"on the {PLACES[where]}: {why}", markup=False)
    values = {
        "op": op,
        "target": where,
        "ranks": work.num_ranks,
        "shape": dict(work.shape),
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


def choose_target(
    target: str, ranks: int | None, nodes: str, *, asks: str = "--target cuda",
    instead: str = "use --target emu", others: Sequence[str] = (),
) -> tuple[int | None, str, str]:  # fmt: skip
    """How many ranks, where they run, and why there.

    `auto` takes GPUs where there are at least two, one for each rank, else the emulator. GPUs of
    one host are one node, unless `cuda` is asked for together with several. `asks` names what asks
    for GPUs where there are too few, `instead` what to do without them, `others` which targets
    the verb takes besides.
    """
    if target not in TARGETS:
        raise UsageError(f"--target {target!r}: one of {', '.join([*TARGETS, *others])}")
    if target == "emu":
        return ranks, "emu", "as --target says"
    there = count_gpus()
    asked = ranks if ranks is not None else _ranks_on(nodes, max(there, 2))
    if target == "auto":
        if nodes != "1":
            why = f"--nodes {nodes}; the GPUs of one host are one node unless --target cuda says"
            return ranks, "emu", why
        if there < 2:
            return ranks, "emu", f"{counted(there, 'GPU')} here, at least two are needed"
        if ranks is not None and ranks > there:
            return ranks, "emu", f"{counted(ranks, 'rank')}, but {counted(there, 'GPU')} here"
        return asked, "cuda", f"{counted(there, 'GPU')} here, {counted(asked, 'rank')}"
    is_shared = there > 0 and Settings.from_environment().share_gpus
    if there < asked and not is_shared:
        raise UsageError(
            f"{asks}: {counted(asked, 'GPU')} needed, one for each rank, {there} here; "
            f"{instead}, fewer ranks, or WEFT_SHARE_GPUS=1: ranks then take turns on a GPU"
        )
    declared = "" if nodes == "1" else f", declared {nodes} nodes"
    return asked, "cuda", f"as --target says, {counted(there, 'GPU')} here{declared}"


def _ranks_on(nodes: str, there: int) -> int:
    """How many ranks `--nodes` holds: its sizes' sum, or one for each GPU."""
    sizes = parse_nodes(nodes)
    return there if isinstance(sizes, int) else sum(sizes)


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def show(values: dict, steps: list[Step]) -> None:
    out = console.results()
    out.print(
        f"{values['op']} on {counted(values['ranks'], 'rank')}, {values['target']}, "
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
