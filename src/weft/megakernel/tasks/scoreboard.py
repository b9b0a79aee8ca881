"""The device side of tasks: which counters one waits for and signals, and how a call ends.

A task may start when counters of its rank have come far enough, and moves counters when its tile is
stored: its own rank's, or those of the ranks that have been sent the tile. Counters are int64 words
on the symmetric heap that only grow; what a call waits for is counted from `bases`, where they
stood when it began:

    wait   words[counter] >= bases[counter] + at_least
    notify words[counter]@rank += amount
    end    bases[counter] += totals[counter]          by the last worker, for the next call

`totals` is what a call adds to a counter in all, and every call waits for it, so bases and words
are equal between calls, and calls of other sizes, with other tables, may use the same words.

A rank that is a call ahead must not move counters of a rank that still waits for this call's:
every worker waits for the slot's credits first. All workers must be on the device together.

Dtypes  tables are int32, on the device: rows of TASK, WAIT and BUMP numbers
Source  docs/megakernel.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots

# Numbers in a row of each table.
TASK, WAIT, BUMP = tl.constexpr(16), tl.constexpr(2), tl.constexpr(3)
# Counters whose bases are moved at once.
BLOCK = tl.constexpr(128)


class Board(NamedTuple):
    """A rank's tables and counters; `weft.megakernel.tables` makes them."""

    tasks: Any  # the fields of Task, and what fills up to TASK
    waits: Any  # counter, at_least
    bumps: Any  # rank, counter, amount
    totals: Any  # [counters]
    words: Any  # int64 [counters], symmetric
    bases: Any  # int64 [counters]
    counts: Any  # tasks, counters: as arguments they would compile a kernel for each rank


class Task(NamedTuple):
    """A row of `tasks`: tile (i_m, i_n) of operation `op` among those that `body` does.

    Of collectives: `rows` rows from `row` on, or of each rank's part from `part_row` on, go to
    those from `to_row` on; `owner` is the rank that sums them, or whose summand is the first.
    """

    body: Any
    op: Any
    i_m: Any
    i_n: Any
    row: Any
    part_row: Any
    to_row: Any
    rows: Any
    owner: Any
    first_wait: Any
    end_wait: Any
    first_bump: Any
    end_bump: Any


@triton.jit
def begin(world, slot):
    """The call's number, once counters and buffers of all ranks may be written."""
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    return e


@triton.jit
def task_at(board, turn):
    row = board.tasks + turn * TASK
    return Task(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4),
        tl.load(row + 5), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
        tl.load(row + 10), tl.load(row + 11), tl.load(row + 12),
    )  # fmt: skip


@triton.jit
def wait_for(world, board, task):
    """Until all that the task reads is there, and what it overwrites has been read."""
    for i in range(task.first_wait, task.end_wait):
        counter = tl.load(board.waits + i * WAIT)
        at_least = tl.load(board.bases + counter) + tl.load(board.waits + i * WAIT + 1)
        wl.wait(board.words + counter, at_least, world=world)


@triton.jit
def notify(world, board, task):
    """Signal that the task is done to all ranks that wait for it: one release, then the signals."""
    if task.first_bump < task.end_bump:
        wl.fence(world)
    for i in range(task.first_bump, task.end_bump):
        row = board.bumps + i * BUMP
        to, counter, amount = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        # weft: allow peer-from-data: tables name ranks of the graph, which check.py has seen
        wl.notify(world, board.words + counter, amount, to=to, order=wl.Order.RELAXED)


@triton.jit
def finish(world, board, slot, e, num_workers):
    """The worker has no task left; the last one ends the call."""
    if slots.slot_is_last(slot, num_workers):
        num_counters = tl.load(board.counts + 1)
        for start in range(0, num_counters, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mask = i < num_counters
            base = tl.load(board.bases + i, mask=mask) + tl.load(board.totals + i, mask=mask)
            tl.store(board.bases + i, base, mask=mask)
        slots.slot_close(world, slot, e)
