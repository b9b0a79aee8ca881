"""Workers: programs of a persistent launch with a role each, tasks one by one, and dependencies.

Plain `@triton.jit` on top of the primitives, the same for every target. Programs that wait for
each other must all be on the device: launch cooperatively, or no more than fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.language.ordered import atomic_add, store
from weft.language.signals import notify, notify_all, wait

COMMUNICATE = tl.constexpr(0)
COMPUTE = tl.constexpr(1)
RELAY = tl.constexpr(2)
REDUCE = tl.constexpr(3)


class Split(NamedTuple):
    """How many programs take which role; a kernel takes it `as_constexpr`."""

    communicate: Any = 0
    compute: Any = 0
    relay: Any = 0
    reduce: Any = 0

    def as_constexpr(self) -> Split:
        return Split(*map(tl.constexpr, self))

    @property
    def num_programs(self) -> int:
        return sum(self)


class TaskTable(NamedTuple):
    """Tasks and what they wait for; task t waits for deps[first_dep[t] : first_dep[t + 1]]."""

    first_dep: Any  # int32 [tasks + 1], local
    deps: Any  # int32, local: tasks, of any rank
    done: Any  # int64 [tasks], symmetric: the last round in which a task was done
    epoch: Any  # int64 word, local: rounds that are over


@triton.jit
def worker_role(program, split):
    """(role, index within the role, how many have it) of a program: communicators come first.

    Roles are COMMUNICATE, COMPUTE, RELAY and REDUCE; the launch has sum(split) programs.
    """
    behind_0 = split.communicate
    behind_1 = behind_0 + split.compute
    behind_2 = behind_1 + split.relay
    # Arithmetic, not branches: the same text serves integers and traced scalars.
    past_0 = min(max(program - behind_0 + 1, 0), 1)
    past_1 = min(max(program - behind_1 + 1, 0), 1)
    past_2 = min(max(program - behind_2 + 1, 0), 1)
    role = past_0 + past_1 + past_2
    index = program - past_0 * split.communicate - past_1 * split.compute - past_2 * split.relay
    num = (
        (1 - past_0) * split.communicate
        + (past_0 - past_1) * split.compute
        + (past_1 - past_2) * split.relay
        + past_2 * split.reduce
    )
    return role, index, num


@triton.jit
def next_task(counter, num_tasks, num_workers):
    """The next task by order of arrival; num_tasks or more when none is left.

        task = counter;   counter <- counter + 1

    The last worker to be told that none is left zeroes the counter for the next launch.

    Shapes  counter: a scalar pointer to one local int32 word, zeroed once; each of num_workers
            programs asks until it is refused once
    Sync    none: which task is whose says nothing about memory
    """
    task = atomic_add(counter, 1, order="relaxed", scope="gpu")
    if task == num_tasks + num_workers - 1:
        store(counter, 0, scope="gpu")
    return task


@triton.jit
def static_task(turn, index, num_workers):
    """The same with a fixed choice: task `turn * num_workers + index`. Deterministic."""
    return turn * num_workers + index


@triton.jit
def wait_deps(world, tasks, t):
    """Wait until every task that t depends on has been released in this round.

        for d in deps of t:   wait  done[d] >= epoch + 1

    Sync    pairs with release_tile on whichever rank did d; bounded
    """
    e = tl.load(tasks.epoch) + 1
    for i in range(tl.load(tasks.first_dep + t), tl.load(tasks.first_dep + t + 1)):
        wait(tasks.done + tl.load(tasks.deps + i), at_least=e, world=world)


@triton.jit
def release_tile(world, tasks, t, to):
    """Say on rank `to` that task t is done: its tile may be read there.

        done[t]@to  <-  epoch + 1

    Sync    releases what this program wrote, as notify
    """
    notify(world, tasks.done + t, tl.load(tasks.epoch) + 1, to=to, op="set")


@triton.jit
def release_tile_everywhere(world, tasks, t):
    """release_tile to every rank."""
    notify_all(world, tasks.done + t, tl.load(tasks.epoch) + 1, op="set")
