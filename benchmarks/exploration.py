"""How fast schedules are explored, how that grows, and what the reduction saves.

    python benchmarks/exploration.py [-o benchmarks/results/exploration.json] [--seconds 60]

Rows of three tables, each explored on one core with every check on, kernel cache warm:

* operators: one call of each operator and transport in its smallest world (2 ranks, two tiles a
  rank), and of some on 3 and 4 ranks;
* programs: one kernel whose programs signal around a ring, or draw tickets from one counter;
* saved: the same kernels, small, with every order of all steps run beside it.

A row that reached its bound says so: its executions are not all there are. Rates are by the
processor's time, which a busy machine changes less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from emulator import environment

import weft
import weft.language as wl
from weft.ops import cards
from weft.tools.check import Work
from weft.tools.subjects import smallest, subjects_of_op
from weft.verify.exploration.execution import Execution
from weft.verify.exploration.search import Bounds, Ran, search

LARGER = {"all_gather": ("sm_push", "ring"), "all_reduce": ("two_shot",), "ag_gemm": ("ce_push",)}


def explored(subject: Callable[..., Ran], seconds: float, **options: bool) -> dict:
    """One row's values: the search, and what it took."""
    start = time.process_time()
    result = search(subject, Bounds(seconds=seconds), **options)
    cpu_s = max(time.process_time() - start, 1e-9)
    return {
        "executions": result.executions, "abandoned": result.abandoned, "steps": result.steps,
        "not_taken": result.not_taken, "complete": result.complete, "bound": result.bound,
        "seconds": result.seconds, "cpu_seconds": cpu_s,
        "executions_per_cpu_s": (result.executions + result.abandoned) / cpu_s,
        "ok": result.report.ok,
    }  # fmt: skip


def operator_rows(seconds: float) -> list[dict]:
    rows = []
    for name, card in cards().items():
        for ranks in (2, 3, 4):
            work = Work(card, ranks, smallest(card, ranks), "float32")
            for subject in subjects_of_op(work):
                config = replace(subject.config, **card.smallest_config)
                if ranks > 2 and config.transport not in LARGER.get(name, ()):
                    continue
                small = replace(subject, config=config)
                small.run()  # compiles
                row = {"op": name, "transport": config.transport, "ranks": ranks}
                rows.append({**row, **explored(small.run, seconds, deterministic=True)})
                show(rows[-1])
    return rows


@triton.jit
def ring(words, num_programs):
    """Everybody signals its neighbour and waits for the other one."""
    i = tl.program_id(0)
    wl.atomic_add(words + (i + 1) % num_programs, 1, order="release", scope="gpu")
    wl.wait(words + i, at_least=1, scope="gpu")


@triton.jit
def tickets(words, num_programs):
    """Everybody draws a number from one counter; the order makes a difference."""
    wl.atomic_add(words, 1, order="acq_rel", scope="gpu")


KERNELS = {"ring of signals": ring, "tickets": tickets}


def kernel_subject(kernel: triton.JITFunction, programs: int) -> Callable[[Execution | None], Ran]:
    def main() -> None:
        words = torch.zeros(programs, dtype=torch.int32)
        kernel[(programs,)](words, programs)

    def subject(execution: Execution | None = None) -> Ran:
        with weft.emulated(ranks=1, chooser=execution, collect=True) as session:
            session.run(main)
        return Ran(session.report)

    return subject


def program_rows(seconds: float) -> list[dict]:
    rows = []
    for name, kernel in KERNELS.items():
        for programs in (2, 3, 4, 5, 6, 8):
            if name == "tickets" and programs > 6:
                continue
            subject = kernel_subject(kernel, programs)
            subject()  # compiles
            rows.append({"kernel": name, "programs": programs, **explored(subject, seconds)})
            show(rows[-1])
    return rows


def saved_rows(seconds: float) -> list[dict]:
    rows = []
    for name, kernel in KERNELS.items():
        for programs in (2, 3):
            subject = kernel_subject(kernel, programs)
            for reduce in (True, False):
                row = {"kernel": name, "programs": programs, "reduction": reduce}
                rows.append({**row, **explored(subject, seconds, reduce=reduce)})
                show(rows[-1])
    return rows


def show(row: dict) -> None:
    words = [str(value) for key, value in row.items() if key in NAMES]
    state = "complete" if row["complete"] else f"stopped at {row['bound']}"
    print(
        f"{' '.join(words):36s} {row['executions']:6d} executions, {row['abandoned']} given up,"
        f" {row['steps']} steps, {row['executions_per_cpu_s']:.1f} a second; {state}",
        flush=True,
    )


NAMES = ("op", "transport", "ranks", "kernel", "programs", "reduction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row")
    options = parser.parse_args()
    tables = {
        "operators": operator_rows(options.seconds),
        "programs": program_rows(options.seconds),
        "saved": saved_rows(options.seconds),
    }
    if options.output:
        document = {
            **environment(),
            "load": os.getloadavg()[0],
            "seconds_for_each_row": options.seconds,
            **tables,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
