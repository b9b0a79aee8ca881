"""What is said of an operator without one of its signals or waits: the remedy puts it back."""

from __future__ import annotations

import pytest

from weft.ops import cards
from weft.tools.mutants import trial_runs
from weft.verify.mutants.rewrites import SAYS_NOTHING, Census, OneMutant

WAIT = "signal (release) after the write and wait for it (acquire) before the read"
CREDIT = "signal (release) after the read and wait for it (acquire) before the write"
WRITE_FIRST = "write it first, or wait for the rank that does"
FREE = "before a buffer is used again, wait for a credit of each of its readers"
SIGNAL = "signal once more, to this rank and word"

# By operator and transport: (what is left out, in which file, in which kernel).
CASES = [
    ("reduce_scatter", "sm_push", {
        ("notify", "mailboxes.py:", "push"): SIGNAL, ("wait", "mailboxes.py:", "push"): WRITE_FIRST,
    }),
    ("all_gather", "ce_pull", {
        ("wait", "slots.py:", "stage"): CREDIT, ("wait", "copied.py:", "announce"): WAIT,
        ("notify", "copied.py:", "announce"): SIGNAL,
    }),
    ("ag_gemm", "sm_push", {
        ("wait", "slots.py:", "ag_gemm_multiply"): FREE, ("wait", "gemm.py:", "ag_gemm_multiply"):
            WRITE_FIRST,
        ("notify", "signals.py:", "ag_gemm_multiply"): SIGNAL,
    }),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transport", "cases"), CASES)
def test_the_remedy_puts_back_what_was_left_out(name, transport, cases):
    run, *_ = trial_runs(cards()[name], transport)
    census = Census()
    run.run(0, census)
    for (primitive, line, kernel), remedy in cases.items():
        (mutant, *_) = (
            one for one in census.mutants
            if (one.kind, one.site.primitive, one.site.kernel) == ("drop", primitive, kernel)
            and any(str(part).startswith(line) for part in one.site.lines)
        )  # fmt: skip
        found = [
            one for seed in range(3) for one in run.run(seed, OneMutant(mutant))
            if one.kind not in SAYS_NOTHING
        ]  # fmt: skip
        assert found[0].remedy.startswith(remedy), f"{mutant}\n{found[0]}"
