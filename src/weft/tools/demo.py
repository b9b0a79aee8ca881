"""`weft demo`: one operator from its first run to its binaries, on ranks that are not there."""

from __future__ import annotations

import contextlib
import linecache
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rich.rule import Rule
from rich.syntax import Syntax

from weft.base.dtypes import FLOATS
from weft.base.report import DEADLOCK_KINDS, Finding, Report
from weft.base.target import parse_target
from weft.tools import console, options
from weft.tools.check import Work
from weft.tools.compile import compile_for, show_kernels
from weft.tools.kernels import of_operator
from weft.tools.programs import find_op
from weft.tools.run import run
from weft.tools.subjects import OpSubject, subjects_of_op
from weft.tools.verify import run_schedules

if TYPE_CHECKING:
    from weft.verify.mutants.records import Line

OPERATOR = "ag_gemm"
RANKS = 4
SCHEDULES = 25
TARGETS = ("cuda:90", "hip:gfx942")

# Llama-3 70B's QKV projection (n 2560, k 8192 on each of four ranks) and 997 rows to a rank,
# all an eighth or sixteenth of it: nothing divides by a tile, and the last shard is short.
SHAPE = "m=499,n=160,k=512"
SMALL = {"m": 99, "n": 40, "k": 64}
# What is taken out, and what it is there for.
BROKEN = {
    "wait": "Each tile waits for the rows that it reads. Not any more:",
    "notify": "Each chunk of rows is announced. Not any more:",
}


def demo(json: options.AsJson = False) -> int:
    """Show what weft does with one operator, in about a minute, without a GPU.

    Its answers, 25 schedules, a wait and a signal taken out and found missing, its binaries.
    """
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        ok = shown()
    if json:
        seconds = round(time.perf_counter() - start, 3)
        console.print_json({"op": OPERATOR, "ranks": RANKS, "ok": ok, "seconds": seconds})
    return console.FINE if ok else console.PROBLEM


def shown() -> bool:
    """Every chapter; did all go as it should?"""
    out = console.results()
    start = time.perf_counter()
    out.print(
        "\n[bold]weft[/]: AG+GEMM, an all-gather and a matrix multiplication in one kernel,\n"
        f"on {RANKS} ranks that this machine does not have."
    )
    subjects = subjects_of_op(Work(find_op(OPERATOR), RANKS, SMALL, "float32"))
    with chapter("1. Is the answer right?"):
        good = not any(
            run(OPERATOR, RANKS, target="emu", shape=SHAPE, dtype=dtype) for dtype in FLOATS
        )
        out.print(
            "Triton's own front end lowered the kernels; numpy ran them, all ranks at once, with\n"
            "every access checked for races, bounds, scopes and unwritten memory."
        )
    with chapter(f"2. Is it right whatever runs first? {SCHEDULES} schedules"):
        good &= not run_schedules([*subjects], range(SCHEDULES), "", False)
    for number, (primitive, story) in enumerate(BROKEN.items(), 3):
        with chapter(f"{number}. The same kernel with one {primitive} taken out"):
            good &= broken(subjects, primitive, story)
    with chapter("5. The same source for GPUs"):
        good &= binaries()
    what_next(time.perf_counter() - start)
    if not good:
        console.notes().print("[bold red]weft: the demo did not go as it should; see above[/]")
    return good


@contextmanager
def chapter(title: str) -> Iterator[None]:
    out = console.results()
    out.print()
    out.print(Rule(f"[bold]{title}", align="left", style="cyan"))
    start = time.perf_counter()
    yield
    out.print(f"[dim]{time.perf_counter() - start:.1f} s[/]")


def broken(subjects: list[OpSubject], primitive: str, story: str) -> bool:
    """The operator without one such call; is it missed?"""
    out = console.results()
    report, line = without(subjects, primitive)
    out.print(story)
    out.print(
        Syntax(
            "".join(linecache.getlines(line.file)[line.number - 3 : line.number + 2]).rstrip(),
            "python", line_numbers=True, start_line=line.number - 2,
            highlight_lines={line.number}, background_color="default",
        )
    )  # fmt: skip
    if report.ok:
        out.print("[bold red]nothing was found[/]")
    else:
        out.print(f"[bold red]found[/] under schedule {report.schedules - 1}:")
        out.print(textwrap.indent(finding_text(report.findings[0]), "  "), markup=False)
    return not report.ok


def finding_text(finding: Finding) -> str:
    """The finding as a user would read it; of a deadlock, the table of who waits for what."""
    text = str(finding)
    if finding.kind in DEADLOCK_KINDS:
        text = f"{finding.kind}: {finding.message}".split("\n    the host of")[0]
    return text.replace(f"{Path.cwd()}/", "")


def without(subjects: list[OpSubject], primitive: str) -> tuple[Report, Line]:
    """What the first schedule to find it says of the kernel without one such call of its hooks, and
    where that call stands."""
    from weft.verify.mutants.rewrites import Census, OneMutant

    census = Census()
    subjects[0].run(rewrite=census)
    dropped = [
        (mutant, line) for mutant in census.mutants
        if (mutant.kind, mutant.site.primitive) == ("drop", primitive)
        for line in mutant.site.lines if Path(line.file).parent.name == "hooks"
        and f"wl.{primitive}(" in linecache.getline(line.file, line.number)
    ]  # fmt: skip
    # That a credit is gone only a second call shows: then another one is taken out.
    for one, seed in product(dropped, range(SCHEDULES)):
        subject = subjects[seed % len(subjects)]
        report = subject.run(seed=seed, rewrite=OneMutant(one[0])).report
        report.schedules = seed + 1
        if not report.ok:
            break
    return report, one[1]


def binaries() -> bool:
    """The kernels compiled for GPUs that are not here, and read back."""
    card = find_op(OPERATOR)
    problem = card.make_problem(RANKS, {"m": 4096, "n": 2560, "k": 8192}, "bfloat16")
    kernels, complaints = [], []
    for target in map(parse_target, TARGETS):
        built, found = compile_for(of_operator(card, problem), target)
        complaints += found
        kernels += [one.to_json() for one in built]
    show_kernels(kernels)
    as_written = (
        "Checked after compilation: no wait lost, no guarded load before its wait,\n"
        "stores complete before each release."
    )
    console.results().print("\n".join(complaints) or as_written, markup=False)
    return not complaints


def what_next(seconds: float) -> None:
    out = console.results()
    out.print()
    out.print(Rule(f"[bold]What to try next[/]  [dim]({seconds:.0f} s so far)", align="left"))
    rows = [
        ("find a bug yourself", "weft emulate examples/05_find_the_bug.py --ranks 4"),
        ("read how to write one", "docs/tutorial.md, examples/01_load.py"),
        ("run it your way", "weft run ag_gemm --ranks 3 --shape m=291,n=70,k=50"),
        ("look at this machine", "weft doctor"),
    ]
    console.print_table(rows)
