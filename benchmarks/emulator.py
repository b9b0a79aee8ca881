"""How fast the emulator is: ag_gemm on emulated ranks with every check on.

    python benchmarks/emulator.py [-o benchmarks/results/emulator.json] [--plot FILE.png]

Times are of whole calls on all ranks, kernel cache warm, imports and world setup excluded, median
of five; every result is compared with the reference before it is timed. The targets are those of
a call at m = n = k = 256 on 4 ranks, of the kernel in Gluon too that runs on Hopper; the other rows
show how time grows in ranks, programs and tile size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

import weft
from weft.base.dtypes import tolerance
from weft.ops import cards

ROUNDS = 5
TARGET_S = {32: 0.4, 64: 0.15, "sm90": 1.0}


def measure(
    ranks: int, m: int, n: int, k: int, tile: int, *, transport: str = "ce_push", tma: bool = False,
    dtype: str = "float16", seed: int = 0, template: str = "plain",
) -> dict:  # fmt: skip
    """One row: the median time of a call on all ranks, its answer checked."""
    op = cards()["ag_gemm"]
    problem = op.make_problem(ranks, {"m": m, "n": n, "k": k}, dtype)
    is_sm90 = template == "sm90"
    config = op.config(
        transport=transport, chunks=2, tile_m=tile, tile_n=tile, tile_k=64 if is_sm90 else tile,
        num_warps=4, pushers=8, tma=tma, template=template,
    )  # fmt: skip
    inputs = [op.make_inputs(problem, rank, seed) for rank in range(ranks)]
    expected = op.reference(problem, inputs)
    with weft.emulated(ranks=ranks, seed=seed, arch=90 if is_sm90 else 0) as session:
        worlds = session.run(lambda: weft.init())
        call = lambda rank: op.run(worlds[rank], problem, inputs[rank], config)  # noqa: E731
        outputs = session.run(call)
        for got, want in zip(outputs, expected, strict=True):
            error = ((got.float() - want).norm() / want.norm()).item()
            assert error <= tolerance(dtype, k), f"wrong answer: relative error {error:.2e}"
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            session.run(call)
            seconds.append(time.perf_counter() - start)
        assert session.report.ok, session.report
        session.run(lambda rank: worlds[rank].close())
    tiles = -(-m // tile) * -(-n // tile)
    return {
        "ranks": ranks, "m": m, "n": n, "k": k, "tile": tile, "transport": transport, "tma": tma,
        "template": template, "dtype": dtype, "tiles_per_rank": tiles,
        "median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds),
        "checked": True,
    }  # fmt: skip


def rows() -> list[dict]:
    found = []
    for tile in (32, 64):
        for transport in ("ce_push", "sm_push"):
            for tma in (False, True):
                found.append(measure(4, 256, 256, 256, tile, transport=transport, tma=tma))
    found += [measure(ranks, 64 * ranks, 256, 256, 32) for ranks in (1, 2, 4, 8)]
    found += [measure(4, 256, n, 256, 32) for n in (64, 128, 512, 1024)]
    found += [measure(4, 256, 256, 256, tile) for tile in (16, 128)]
    return found + hopper_rows()


def hopper_rows() -> list[dict]:
    found = []
    for transport in ("ce_push", "sm_push"):
        how = {"transport": transport, "tma": True, "template": "sm90"}
        found.append(measure(4, 256, 256, 256, 128, **how))
    return found


@triton.jit
def _add(x, y, out, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def _pass_by(counter):
    tl.atomic_add(counter, 1)


def measure_programs(programs: int) -> dict:
    """One row: a plain kernel, and a counter that every program passes, on one rank."""
    n = programs * 64

    def main() -> tuple[float, float]:
        x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
        counter = torch.zeros(1, dtype=torch.int32)
        start = time.perf_counter()
        _add[(programs,)](x, y, out, n, 64)
        assert torch.equal(out, x + y)
        middle = time.perf_counter()
        _pass_by[(programs,)](counter)
        assert counter.item() == programs
        return middle - start, time.perf_counter() - middle

    with weft.emulated(ranks=1) as session:
        session.run(main)  # compiles
        times = [session.run(main)[0] for _ in range(ROUNDS)]
        assert session.report.ok, session.report
    add, count = (statistics.median(column) for column in zip(*times, strict=True))
    return {"programs": programs, "add_s": add, "counter_s": count, "checked": True}


def environment() -> dict:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "commit": commit,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
    }


def plot(results: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
    plain = [
        r for r in results if r.get("checks", True) and not r["tma"] and r["transport"] == "ce_push"
    ]
    series = (
        ("ranks", [r for r in plain if r["m"] == 64 * r["ranks"] and r["n"] == 256
                   and r["tile"] == 32]),
        ("tiles_per_rank", [r for r in plain if r["ranks"] == 4 and r["tile"] == 32]),
        ("tile", [r for r in plain if (r["ranks"], r["m"], r["n"]) == (4, 256, 256)]),
    )  # fmt: skip
    for axis, (name, chosen) in zip(axes, series, strict=True):
        chosen = sorted(chosen, key=lambda r: r[name])
        axis.plot([r[name] for r in chosen], [r["median_s"] for r in chosen], "o-")
        axis.set_xlabel(name.replace("_", " "))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
    axes[0].set_ylabel("seconds per call, all ranks")
    figure.suptitle("ag_gemm on the emulator, all checks on")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results = rows()
    for row in results:
        print(
            f"ranks {row['ranks']}  {row['m']}x{row['n']}x{row['k']}  tile {row['tile']:3d}"
            f"  {row['transport']:4s} {'tma' if row['tma'] else 'ptr'} {row['template']:5s}"
            f"  {row['median_s']:.3f} s"
        )
    for of, limit in TARGET_S.items():
        worst = max(
            row["median_s"]
            for row in results
            if of in (row["tile"], row["template"]) and row.get("checks", True)
            and (row["ranks"], row["m"], row["n"], row["k"]) == (4, 256, 256, 256)
        )  # fmt: skip
        verdict = "met" if worst <= limit else "MISSED"
        what = f"template {of}" if of == "sm90" else f"{of}-tiles"
        print(f"target with {what}: {worst:.3f} s of {limit} s, {verdict}")
    programs = [measure_programs(count) for count in (250, 1000, 4000, 16000)]
    for row in programs:
        print(
            f"{row['programs']:6d} programs  add {row['add_s']:.3f} s  counter"
            f" {row['counter_s']:.3f} s"
        )
    if options.output:
        document = {"op": "ag_gemm", **environment(), "targets_s": TARGET_S, "rows": results}
        document["programs"] = programs
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
