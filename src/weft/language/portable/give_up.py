"""What a GPU program does when its wait is given up: leave a report, raise the abort word.

Runs in control flow where the threads of a block may differ: no barrier, no atomic whose result
is used. Scalar stores are made by one thread, the same for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import world_layout as layout

RANK = tl.constexpr(layout.RANK)
REPORT_PTR = tl.constexpr(layout.REPORT_PTR)
REPORT_WORDS = tl.constexpr(layout.REPORT_WORDS)
NUM_REPORTS = tl.constexpr(layout.NUM_REPORTS)
CHECK = tl.constexpr(layout.REPORT_CHECK)
MAGIC = tl.constexpr(layout.REPORT_MAGIC)
ON_RANK = tl.constexpr(layout.REPORT_RANK)
SIGNAL = tl.constexpr(layout.REPORT_SIGNAL)
EXPECTED = tl.constexpr(layout.REPORT_EXPECTED)
SEEN = tl.constexpr(layout.REPORT_SEEN)
PROGRAM = tl.constexpr(layout.REPORT_PROGRAM)
NAME = tl.constexpr(layout.REPORT_NAME)
LINE = tl.constexpr(layout.REPORT_LINE)
REASON = tl.constexpr(layout.REPORT_REASON)
BY_DEADLINE = tl.constexpr(layout.REASON_DEADLINE)
BY_ABORT = tl.constexpr(layout.REASON_ABORT)


@triton.jit
def leave_report(word, at_least, seen, world, abort, aborted, site):
    """Write who waited where for what, then tell every other wait of the world to end."""
    reports = tl.load(world.table + REPORT_PTR)
    if reports != 0:
        x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        # Spread by program and call site; a garbled record fails its check word.
        program = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
        slot = (program + site[4].to(tl.int32) * 37) & (NUM_REPORTS - 1)
        record = reports.to(tl.pointer_type(tl.int64)) + slot * REPORT_WORDS
        reason = tl.where(aborted, BY_ABORT, BY_DEADLINE)
        total = _fill(record, ON_RANK, tl.load(world.table + RANK), MAGIC)
        total = _fill(record, SIGNAL, word.to(tl.int64), total)
        total = _fill(record, EXPECTED, at_least, total)
        total = _fill(record, SEEN, seen, total)
        total = _fill(record, PROGRAM, x, total)
        total = _fill(record, PROGRAM + 1, y, total)
        total = _fill(record, PROGRAM + 2, z, total)
        for i in tl.static_range(4):
            total = _fill(record, NAME + i, site[i], total)
        total = _fill(record, LINE, site[4], total)
        total = _fill(record, REASON, reason, total)
        tl.store(record + CHECK, total)
    tl.atomic_xchg(abort, 1, sem="relaxed", scope="sys")


@triton.jit
def _fill(record, index, value, total):
    value = tl.cast(value, tl.int64)
    tl.store(record + index, value)
    return tl.add(total, value, sanitize_overflow=False)
