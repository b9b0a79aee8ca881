"""Each signal of exchanges is needed: of the product's kernel, of pushes, and of what is queued."""

from __future__ import annotations

import pytest
from test_exchanged_products import from_heads, to_heads
from test_staged_sums import calls

import weft
from weft.compiler import Compiled
from weft.tools.mutants import searched
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run

RANKS = 3
PLAIN = {
    "to heads": [to_heads(12, 20 * RANKS)],
    "from heads by SMs": [from_heads(20, 24, RANKS, "sm_push", 2)],
    # Of one chunk the last word that is waited for says that this call has begun here.
    "from heads by engines": [from_heads(20, 24, RANKS, "ce_push", chunks) for chunks in (1, 2)],
}
# Of tiles of two chunks, of one and of four: columns of a rank, so that each consumer has several
# tiles of its own, one after the other; and two programs beside what engines need.
WIDTHS = {128: 520, 64: 264, 256: 520}
GLUON = {
    "to heads": [
        (to_heads(136, 2 * n, "bfloat16", (128, width, 64)), 300, 2) for width, n in WIDTHS.items()
    ],
    "from heads": [
        *((from_heads(128, n, 2, "ce_push", 1, dtype="bfloat16", tile=(128, width, 64)), 300, 3)
          for width, n in WIDTHS.items()),
        # The last tiles are shared, from within a slice on.
        (from_heads(576, 104, 2, "ce_push", 1, dtype="bfloat16", tile=(128, 128, 64)), 150, 7),
        # Tiles of an odd number of chunks, whole ones and then shared ones.
        (from_heads(320, 400, 2, "ce_push", 1, dtype="bfloat16", tile=(128, 160, 64)), 300, 5),
    ],
}  # fmt: skip


def run_of(compiled: Compiled, num_ranks: int, rows: tuple[int, ...], **how: int) -> Run:
    """Calls of several sizes behind each other on one slot, other numbers each."""

    def run(seed, rewrite, observers=()):
        with weft.emulated(
            num_ranks, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed),
            observers=observers, **how,
        ) as session:  # fmt: skip
            session.run(lambda: calls(compiled, rows))
        return session.report

    return Run(compiled.stages.program.name, run)


def all_caught(runs: list[Run], num_ranks: int, fewest: int, monkeypatch) -> None:
    monkeypatch.setenv("WEFT_SLOTS", "1")
    bounds = Bounds(schedules=16, argued=2, jobs=1)
    report = searched(runs, bounds, runs[0].name, num_ranks, None)
    assert report.ok and len(report.verdicts) > fewest, str(report)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", PLAIN)
def test_every_signal_is_needed(case: str, monkeypatch):
    runs = [run_of(one, RANKS, (56, 56, 1, 56, 25, 56)) for one in PLAIN[case]]
    all_caught(runs, RANKS, 40, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", GLUON)
def test_every_signal_is_needed_in_gluon(case: str, monkeypatch):
    runs = [run_of(one, 2, (m, m, 1, m), arch=90, num_sms=sms) for one, m, sms in GLUON[case]]
    all_caught(runs, 2, 100, monkeypatch)
