"""Programs on the many-core target, compiled by the host's C compiler: right, counted as predicted,
with the same times in every run."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from manycore_programs import Case, in_order, of_sizes, programs

from weft import manycore
from weft.base.errors import WeftError
from weft.manycore import build, emit
from weft.manycore.traffic import Traffic
from weft.manycore.workloads import WORKLOADS, measure

needs_cc = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)
needs_tsan = pytest.mark.skipif(
    not build.has(*build.SANITIZED), reason="the C compiler has no ThreadSanitizer"
)
pytestmark = needs_cc
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "manycore.json"
NAMES = [*programs("float32")]
FIRST = ("mlp", "on_rows")
# What a rank's part of cannot be empty, or is not the same on all ranks.
OF_TWO = ("attend", "scatter_columns")


@cache
def case(name: str, dtype: str, m: int, num_ranks: int) -> Case:
    return Case(programs(dtype)[name], {"m": m}, num_ranks)


def runs(names=NAMES):
    for name in names:
        for m, num_ranks in ((37, 2), (37, 1), (1, 2), (8, 3)):
            if num_ranks == 3 and name in OF_TWO:
                continue
            is_slow = name not in FIRST or m != 37 or num_ranks != 2
            yield pytest.param(name, m, num_ranks, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("name", "m", "num_ranks"), [*runs()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_are_right_and_move_what_was_predicted(name, m, num_ranks, dtype):
    one = case(name, dtype, m, num_ranks)
    plan = one.plan()
    run = manycore.execute(plan, one.inputs)
    one.check(run, dtype)
    for kernel, counted in zip(plan.kernels, run.counted, strict=True):
        moved = sum((kernel.traffic(rank) for rank in range(num_ranks)), Traffic())
        assert moved == counted.traffic, kernel.name
    # Of few rows latencies are all, and ranks without rows have none.
    assert plan.ns() == pytest.approx(run.ns, rel=0.2, abs=0 if m == 37 else 1000)


def test_sums_are_in_the_order_of_k_whatever_the_tiles_and_the_ranks():
    """So a product is bitwise what a plain loop makes of it, and ranks' sums are added in order."""
    one = case("matmul", "float32", 37, 1)
    x, w = one.inputs[0].values()
    found = manycore.execute(one.plan(), one.inputs).results[0]["product"]
    assert torch.equal(found, in_order(x, w))
    many = manycore.execute(one.plan(machine=manycore.SW26010), one.inputs).results[0]["product"]
    assert torch.equal(many, found)
    one = case("gemm_rs", "float32", 37, 2)
    run = manycore.execute(one.plan(), one.inputs)
    whole = sum(in_order(*given.values()) for given in one.inputs)
    assert torch.equal(torch.cat([each["scattered"] for each in run.results]), whole)


def test_times_are_those_of_the_record_and_the_same_in_every_run():
    one = case("mlp", "float32", 37, 2)
    first, second = (manycore.execute(one.plan(), one.inputs) for _ in range(2))
    assert first.counted == second.counted and first.ns > 0


@pytest.mark.parametrize("choices", [
    manycore.Choices(coalesce=False), manycore.Choices(double_buffer=False),
    manycore.Choices(choose_order=False), manycore.Choices(False, False, False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["mlp", "attend"])
@pytest.mark.slow
def test_what_is_left_out_changes_times_and_no_results(name, choices):
    one = case(name, "float32", 37, 2)
    plan = one.plan(choices=choices)
    usual, run = (manycore.execute(p, one.inputs) for p in (one.plan(), plan))
    one.check(run, "float32")
    assert run.ns > usual.ns
    assert plan.ns() == pytest.approx(run.ns, rel=0.2)


def test_coalescing_needs_a_third_of_the_transfers():
    one = case("mlp", "float32", 37, 2)
    usual, by_rows = (
        sum((kernel.traffic(0) for kernel in one.plan(choices=choices).kernels), Traffic())
        for choices in (manycore.Choices(), manycore.Choices(coalesce=False))
    )
    assert 3 * usual.transfers <= by_rows.transfers


@needs_tsan
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_thread_sanitizer_finds_nothing(name, dtype):
    one = case(name, dtype, 37, 2)
    run = manycore.execute(one.plan(), one.inputs, sanitize=True)
    one.check(run, dtype)
    assert run.counted == manycore.execute(one.plan(), one.inputs).counted


@needs_tsan
@pytest.mark.parametrize("line", [
    r"mc_wait\(core, now.got\);", r"mc_wait\(core, got\[now\]\);", r"mc_await_rows\([^;]*;",
    r"mc_await\(core, SIG_PRODUCT_2_SUMS[^;]*;",
])  # fmt: skip
@pytest.mark.slow
def test_a_wait_that_is_missing_is_seen(line, monkeypatch):
    one = case("mlp", "float32", 37, 2)
    plan = one.plan()
    source, count = re.subn(line, ";", emit.source(plan))
    assert count
    monkeypatch.setattr(emit, "source", lambda plan: source)
    # Where the engine comes so late that all is ordered, what is read is NaN, and so is the result.
    with pytest.raises((WeftError, AssertionError), match="data race|normed|scattered|total"):
        for _ in range(5):
            one.check(manycore.execute(plan, one.inputs, sanitize=True), "float32")


def test_a_signal_that_never_comes_is_told(monkeypatch, tmp_path):
    one = case("gather", "float32", 4, 2)
    plan = one.plan()
    source = emit.source(plan).replace(
        "mc_senders(core, mc_part(4, source", "9 + (mc_part(4, source"
    )
    source = source.replace('#include "manycore.h"', '#define MC_SECONDS 1\n#include "manycore.h"')
    path = build.write(tmp_path, "late", source.replace("core->ranks)));", "core->ranks) * 0));"))
    done = subprocess.run(
        [build.find_compiler(), *build.FLAGS, path, "-o", tmp_path / "late", "-lm"]
    )
    assert done.returncode == 0
    (tmp_path / "memory").write_bytes(bytes(2 * emit.rank_bytes(plan)))
    run = subprocess.run(
        [tmp_path / "late", tmp_path / "memory", "all"], capture_output=True, text=True
    )
    assert run.returncode == 3 and "waits for a signal" in run.stderr, run.stderr


@pytest.mark.parametrize("name", [*WORKLOADS])
@pytest.mark.slow
def test_what_the_page_says_of_workloads_is_so(name):
    """Times are the record's, so the file that was measured is what is measured now."""
    document = json.loads(RESULTS.read_text())
    kept = [row for row in document["rows"] if row["workload"] == name]
    found = [asdict(row) for row in measure(name, manycore.SW26010)]
    assert found == kept, "run benchmarks/manycore.py"
    whole, by_rows = found[:2]
    assert 3 * whole["transfers"] <= by_rows["transfers"]
    for row in found:
        assert row["predicted_us"] == pytest.approx(row["us"], rel=0.2)
        assert row["predicted_transfers"] == row["transfers"]
        assert row["predicted_bytes"] == row["bytes"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_any_sizes_on_any_ranks(seed):
    """What nothing divides: ranks without rows, columns or a part of k."""
    draw = random.Random(seed)
    num_ranks, dtype = draw.randint(1, 4), draw.choice(("float32", "bfloat16"))
    k, n, m = (draw.randint(1, 90) for _ in range(3))
    machine = draw.choice((manycore.SMALL, manycore.SW26010))
    for name, program in of_sizes(dtype, k, n).items():
        one = Case(program, {"m": m}, num_ranks)
        plan = one.plan(machine)
        run = manycore.execute(plan, one.inputs)
        one.check(run, dtype)
        predicted = (kernel.traffic(rank) for kernel in plan.kernels for rank in range(num_ranks))
        assert run.traffic == sum(predicted, Traffic()), (name, k, n, m, num_ranks)
