"""Tickets: programs of a persistent launch draw their tasks one by one.

Plain `@triton.jit` on top of the primitives, the same for every target.
"""

from __future__ import annotations

import triton

from weft.language.ordered import atomic_add, store


@triton.jit
def next_task(counter, num_tasks, num_workers):
    """The next task by order of arrival; num_tasks or more when none is left.

        task = counter;   counter <- counter + 1

    The worker that draws the last ticket, behind all tasks, zeroes the counter for the next launch.

    Shapes  counter: a scalar pointer to one local int32 word, zeroed once; each of num_workers
            programs draws until it gets no task, and not again
    Sync    none: a ticket says nothing about memory
    """
    task = atomic_add(counter, 1, order="relaxed", scope="gpu")
    if task == num_tasks + num_workers - 1:
        store(counter, 0, scope="gpu")
    return task
