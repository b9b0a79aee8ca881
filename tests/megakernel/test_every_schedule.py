"""The persistent kernel's scoreboard, exhaustively: every order of the smallest worlds' steps."""

from __future__ import annotations

import math

import pytest
import torch
from persistent_programs import tiled
from test_run import cache, of_rank

import weft
from weft.compiler import Partial, Shard, Tensor, all_gather, reduce_scatter
from weft.megakernel import Persistent
from weft.verify.exploration.search import Bounds, Ran, outcome_bytes, search

assert cache  # a fixture

RANKS, ROWS = 2, 2


def gather(x):
    return all_gather(x)


def scatter(x):
    return reduce_scatter(x)


PLACEMENTS = {gather: Shard(0), scatter: Partial()}


@pytest.mark.parametrize(
    ("function", "how", "calls"),
    [
        (scatter, Persistent(num_workers=1), 2),
        pytest.param(scatter, Persistent(num_workers=2), 2, marks=pytest.mark.slow),
        pytest.param(gather, Persistent(num_workers=2), 1, marks=pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "__name__", None) or getattr(one, "num_workers", one),
)
def test_in_every_order_nothing_is_found_and_results_are_the_same(
    monkeypatch, function, how, calls
):  # fmt: skip
    monkeypatch.setenv("WEFT_SLOTS", "1")
    kind = Tensor("float32", ("m", 1), PLACEMENTS[function])
    program = tiled(function, {"x": kind})

    def main():
        world, results = weft.init(), []
        for call in range(calls):
            whole = torch.arange(float(ROWS))[:, None] + 2 * call
            x = of_rank(kind, whole, {"m": ROWS}, world.rank, RANKS)
            results += how.run_persistent(program, {"x": x}, {"m": ROWS}, world=world)
        return results

    def subject(execution) -> Ran:
        with weft.emulated(RANKS, chooser=execution, collect=True) as session:
            results = session.run(main)
        return Ran(session.report, outcome_bytes(results))

    found = search(subject, Bounds(executions=2000, seconds=math.inf), deterministic=True)
    assert found.report.ok, str(found.report)
    assert not found.bound, f"a bound was reached after {found.executions} executions"
