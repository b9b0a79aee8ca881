"""What a GPU program does when its wait is given up: leave a report, raise the abort word.

Runs in control flow where the threads of a block may differ: no barrier, no atomic whose result
is used. Scalar stores are made by one thread, the same for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import world_layout as layout


@triton.jit
def leave_report(word, at_least, seen, world, abort, aborted, site):
    """Write who waited where for what, then tell every other wait of the world to end."""
    reports = tl.load(world.table + layout.REPORT_PTR)
    if reports != 0:
        x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        # Spread by program and call site; a garbled record fails its check word.
        program = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
        slot = (program + site[4].to(tl.int32) * 37) & (layout.NUM_REPORTS - 1)
        record = reports.to(tl.pointer_type(tl.int64)) + slot * layout.REPORT_WORDS
        reason = tl.where(aborted, layout.REASON_ABORT, layout.REASON_DEADLINE)
        total = _fill(
            record, layout.REPORT_RANK, tl.load(world.table + layout.RANK), layout.REPORT_MAGIC
        )
        total = _fill(record, layout.REPORT_SIGNAL, word.to(tl.int64), total)
        total = _fill(record, layout.REPORT_EXPECTED, at_least, total)
        total = _fill(record, layout.REPORT_SEEN, seen, total)
        total = _fill(record, layout.REPORT_PROGRAM, x, total)
        total = _fill(record, layout.REPORT_PROGRAM + 1, y, total)
        total = _fill(record, layout.REPORT_PROGRAM + 2, z, total)
        for i in tl.static_range(4):
            total = _fill(record, layout.REPORT_NAME + i, site[i], total)
        total = _fill(record, layout.REPORT_LINE, site[4], total)
        total = _fill(record, layout.REPORT_REASON, reason, total)
        tl.store(record + layout.REPORT_CHECK, total)
    tl.atomic_xchg(abort, 1, sem="relaxed", scope="sys")


@triton.jit
def _fill(record, index, value, total):
    value = tl.cast(value, tl.int64)
    tl.store(record + index, value)
    return tl.add(total, value, sanitize_overflow=False)
