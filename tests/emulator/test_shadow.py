"""What is remembered of a cell's accesses: of many that nothing orders, none is forgotten."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft


@triton.jit
def read_all_then_write(x, out, turn, done, left_out, readers, ATOMICALLY: tl.constexpr):
    """Each program but the last reads `x`, in order of time and no other. The last one acquires
    from all but `left_out` and writes."""
    i = tl.program_id(0)
    if i < readers:
        while tl.atomic_add(turn, 0, sem="relaxed") < i:
            pass
        if ATOMICALLY:
            tl.store(out + i, tl.atomic_add(x, 1, sem="relaxed"))
        else:
            tl.store(out + i, tl.load(x))
        tl.atomic_add(done + i, 1, sem="release")
        tl.atomic_add(turn, 1, sem="relaxed")
    else:
        while tl.atomic_add(turn, 0, sem="relaxed") < readers:
            pass
        for j in range(readers):
            if j != left_out:
                tl.atomic_add(done + j, 0, sem="acquire")
        tl.store(x, 7)


@pytest.mark.parametrize("atomically", [False, True])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_the_one_access_that_is_not_ordered_is_found_whichever_it_is(readers, atomically):
    for left_out in (*range(readers), None):
        with weft.emulated(ranks=1, collect=True) as session:
            session.run(lambda: _run(left_out, readers, atomically))
        found = {
            side.program[0]
            for finding in session.report.races
            for side in finding.sides
            if side.program is not None
        }
        assert found == (set() if left_out is None else {left_out, readers}), session.report


def _run(left_out, readers, atomically):
    words = [torch.zeros(n, dtype=torch.int32) for n in (1, readers, 1, readers)]
    missing = -1 if left_out is None else left_out
    read_all_then_write[(readers + 1,)](*words, missing, readers, atomically)
