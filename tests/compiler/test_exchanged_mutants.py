"""Each signal of exchanges is needed: of the product's kernel, of pushes, and of what is queued."""

from __future__ import annotations

import pytest
from test_exchanged_products import HOPPER, from_heads, to_heads
from test_staged_sums import calls

import weft
from weft.tools.mutants import searched
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run

RANKS = 3
PLAIN = {
    "to heads": (to_heads(12, 20 * RANKS), 0),
    "from heads by SMs": (from_heads(20, 24, RANKS, "sm_push", 2), 0),
    "from heads by engines": (from_heads(20, 24, RANKS, "ce_push", 2), 0),
}
GLUON = {
    "to heads": (to_heads(72, 136 * 2, "bfloat16", HOPPER), 90),
    "from heads by engines": (
        from_heads(64, 136, 2, "ce_push", 2, dtype="bfloat16", tile=HOPPER), 90,
    ),
}  # fmt: skip
CASES = [pytest.param(*case, id=f"{name}{' in Gluon' * (case[1] > 0)}")
         for cases in (PLAIN, GLUON) for name, case in cases.items()]  # fmt: skip


def run_of(compiled, arch: int) -> Run:
    """Calls of several sizes behind each other on one slot, other numbers each."""
    ranks, rows = (RANKS, (56, 56, 1, 56, 25, 56)) if not arch else (2, (300, 300, 1, 300))
    how = {"arch": arch, "num_sms": 2} if arch else {}

    def run(seed, rewrite, observers=()):
        with weft.emulated(
            ranks, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed),
            observers=observers, **how,
        ) as session:  # fmt: skip
            session.run(lambda: calls(compiled, rows))
        return session.report

    return Run(f"{compiled.stages.program.name} {arch}", run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("compiled", "arch"), CASES)
def test_every_signal_is_needed(compiled, arch: int, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    bounds = Bounds(schedules=16, argued=2, jobs=1)
    name = compiled.stages.program.name
    report = searched([run_of(compiled, arch)], bounds, name, 2 if arch else RANKS, None)
    assert len(report.verdicts) > 30 and report.ok, str(report)
