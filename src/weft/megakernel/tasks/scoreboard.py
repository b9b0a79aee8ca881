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

Tables are often no longer in L2 when a task comes, and each look into one is a step of the way
from task to task. So a task's row has its first wait and its first signal in it; few have more.

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
TASK, WAIT, BUMP = tl.constexpr(20), tl.constexpr(2), tl.constexpr(3)
# Counters whose bases are moved at once.
BLOCK = tl.constexpr(128)


class Board(NamedTuple):
    """A rank's tables and counters; `weft.megakernel.tables` makes them."""

    tasks: Any  # the fields of Task, and what fills up to TASK
    waits: Any  # counter, at_least: each task's but the first
    bumps: Any  # counter, rank, amount: each task's but the first
    totals: Any  # [counters]
    words: Any  # int64 [counters], symmetric
    bases: Any  # int64 [counters]
    counts: Any  # tasks, counters: as arguments they would compile a kernel for each rank


class Task(NamedTuple):
    """A row of `tasks`: tile (i_m, i_n) of operation `op` among those that `body` does.

    Of collectives: `rows` rows from `row` on, or of each rank's part from `part_row` on, go to
    those from `to_row` on; `owner` is the rank that sums them, or whose summand is the first.
    `part` is the part along k of a product that is split.
    `num_waits` and `num_bumps` count the first ones, which are here; what follows them begins in
    the tables at `rest_of_waits` and `rest_of_bumps`. `is_local`: its one signal
    is to a counter of this rank that no other rank's tasks move.
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
    part: Any
    num_waits: Any
    rest_of_waits: Any
    counter: Any
    at_least: Any
    num_bumps: Any
    rest_of_bumps: Any
    bumped: Any
    to: Any
    amount: Any
    is_local: Any


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
        tl.load(row + 10), tl.load(row + 11), tl.load(row + 12), tl.load(row + 13),
        tl.load(row + 14), tl.load(row + 15), tl.load(row + 16), tl.load(row + 17),
        tl.load(row + 18), tl.load(row + 19),
    )  # fmt: skip


@triton.jit
def wait_for(world, board, task):
    """Until all that the task reads is there, and what it overwrites has been read."""
    counter, at_least = task.counter, task.at_least
    for i in range(task.num_waits):
        if i > 0:
            row = board.waits + (task.rest_of_waits + i - 1) * WAIT
            counter, at_least = tl.load(row), tl.load(row + 1)
        base = tl.load(board.bases + counter)
        wl.wait(board.words + counter, base + at_least, world=world)


@triton.jit
def notify(world, board, task):
    """Signal that the task is done to all ranks that wait for it.

    One release, then the signals. Of most tasks the only signal is to this GPU: nothing outside
    has to know of its release.
    """
    counter, to, amount = task.bumped, task.to, task.amount
    if task.is_local == 1:
        own = wl.rank(world)
        wl.notify(world, board.words + counter, amount, to=own, scope=wl.Scope.DEVICE)
    elif task.num_bumps > 0:
        wl.fence(world)
        for i in range(task.num_bumps):
            if i > 0:
                row = board.bumps + (task.rest_of_bumps + i - 1) * BUMP
                counter, to, amount = tl.load(row), tl.load(row + 1), tl.load(row + 2)
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
