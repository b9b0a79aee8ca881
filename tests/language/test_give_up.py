"""What a wait that gives up leaves behind, run on the emulator: a report, and the abort word."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.language import wait_report, world_layout
from weft.language.portable.give_up import leave_report


@triton.jit
def give_up(world, signal, abort, expected, aborted, site):
    leave_report(signal, expected, tl.load(signal), world, abort, aborted, site)


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("has_reports", [True, False])
def test_who_gives_up_says_so_and_ends_every_other_wait(ranks, has_reports, aborted):
    words = world_layout.REPORT_WORDS * world_layout.NUM_REPORTS
    name = wait_report.pack_name("gather_rows")

    def main():
        reports, abort = torch.zeros(words, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        signal = torch.full((1,), 3, dtype=torch.int64)
        table = torch.zeros(world_layout.table_words(1), dtype=torch.int64)
        table[world_layout.RANK] = 2
        table[world_layout.REPORT_PTR] = reports.data_ptr() if has_reports else 0
        world = wl.WorldArg(table, tl.constexpr(1), tl.constexpr(wl.language_version()))
        give_up[(2,)](world, signal, abort, 5, aborted, (*name, 77))
        return abort.item(), wait_report.read_reports(reports.tolist()), signal.data_ptr()

    ((abort, found, address),) = ranks(main, 1)
    assert abort == 1
    assert found == [
        wait_report.WaitReport(2, "gather_rows", 77, (program, 0, 0), address, 5, 3, not aborted)
        for program in range(2 * has_reports)
    ]
