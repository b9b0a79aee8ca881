"""Kernels on channels and of workers: sound ones, with parts to leave out."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def gather(world, made, used, x, out, num_used, PER_RANK: tl.constexpr, ROWS: tl.constexpr,
           USED_ROWS: tl.constexpr, COLS: tl.constexpr, NOTIFY: tl.constexpr,
           WAIT: tl.constexpr, CREDIT: tl.constexpr):  # fmt: skip
    """All-gather of x, this rank's rows: pushed in tiles of ROWS, used in tiles of USED_ROWS."""
    rank = wl.rank(world)
    cols = tl.arange(0, COLS)
    for j in range(tl.program_id(0), PER_RANK, tl.num_programs(0)):
        i = rank * PER_RANK + j
        first, end = wl.f_shape(i, made.mapping)
        rows = j * ROWS + tl.arange(0, ROWS)
        inside = (rows < j * ROWS + end - first)[:, None] & (cols < made.cols)[None, :]
        values = tl.load(x + rows[:, None] * made.cols + cols[None, :], mask=inside, other=0.0)
        for peer in range(world.num_ranks):
            if CREDIT:
                wl.channel_wait_free(world, made, peer)
            wl.tile_push(world, made, i, 0, values, peer)
            if NOTIFY:
                wl.tile_notify(world, made, i, peer)
    for i in range(tl.program_id(0), num_used, tl.num_programs(0)):
        if WAIT:
            wl.tile_wait(world, used, i)
        pointers, inside = wl.tile_pointers(used, i, 0, USED_ROWS, COLS)
        values = tl.load(pointers, mask=inside, other=0.0)
        tl.store(out + (pointers.to(tl.int64) - used.data.to(tl.int64)) // 4, values, mask=inside)


@triton.jit
def pull(world, made, out, ROWS: tl.constexpr, COLS: tl.constexpr, PEER_WAIT: tl.constexpr):
    """Every rank fills its own part, says so, and pulls the right neighbour's."""
    rank = wl.rank(world)
    right = (rank + 1) % world.num_ranks
    left = (rank + world.num_ranks - 1) % world.num_ranks
    wl.tile_push(world, made, rank, 0, tl.full((ROWS, COLS), rank + 1.0, tl.float32), rank)
    wl.peer_tile_notify(world, made, rank, left)
    if PEER_WAIT:
        wl.peer_tile_wait(world, made, right, right)
    values = wl.tile_pull(world, made, right, 0, right, ROWS, COLS)
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + at, values)


@triton.jit
def copy_rows(channel, x, out, num, COLS: tl.constexpr, ROWS: tl.constexpr):
    """What a stream that has waited may read without a signal of its own."""
    for i in range(num):
        pointers, inside = wl.tile_pointers(channel, i, 0, ROWS, COLS)
        at = (pointers.to(tl.int64) - channel.data.to(tl.int64)) // 4
        tl.store(out + at, tl.load(pointers, mask=inside, other=0.0), mask=inside)


@triton.jit
def draw(world, counter, taken, num_tasks, STATIC: tl.constexpr):
    """Every task is taken once; taken[t] counts."""
    num_workers = tl.num_programs(0)
    if STATIC:
        turn = 0
        t = wl.static_task(turn, tl.program_id(0), num_workers)
        while t < num_tasks:
            tl.atomic_add(taken + t, 1)
            turn += 1
            t = wl.static_task(turn, tl.program_id(0), num_workers)
    else:
        t = wl.next_task(counter, num_tasks, num_workers)
        while t < num_tasks:
            tl.atomic_add(taken + t, 1)
            t = wl.next_task(counter, num_tasks, num_workers)


@triton.jit
def run_tasks(world, split, tasks, values, num_tasks, DEPS: tl.constexpr, RELEASE: tl.constexpr):
    """values[t] = t + sum of values of t's dependencies; ranks take tasks in turn.

    Communicators carry nothing here: they only show that roles are handed out.
    """
    role, index, num = wl.worker_role(tl.program_id(0), split)
    rank = wl.rank(world)
    if role == wl.COMPUTE:
        for j in range(index, num_tasks, num):
            if j % world.num_ranks == rank:
                if DEPS:
                    wl.wait_deps(world, tasks, j)
                total = j.to(tl.int64)
                for i in range(tl.load(tasks.first_dep + j), tl.load(tasks.first_dep + j + 1)):
                    total += tl.load(values + tl.load(tasks.deps + i))
                for peer in range(world.num_ranks):
                    wl.put(world, values + j, total, to=peer)
                    if RELEASE:
                        wl.release_tile(world, tasks, j, peer)


@triton.jit
def channels_and_workers(world, channel, tasks, split, out, counter, n):
    """Every function, for compilers."""
    role, index, num = wl.worker_role(tl.program_id(0), split)
    if role == wl.COMMUNICATE:
        values = wl.tile_pull(world, channel, index, 0, 1, 32, 64)
        wl.tile_push(world, channel, index, 0, values, 2)
        wl.tile_notify(world, channel, index, 2)
    elif role == wl.COMPUTE:
        t = wl.next_task(counter, n, num)
        while t < n:
            wl.wait_deps(world, tasks, t)
            wl.tile_wait(world, channel, t)
            pointers, inside = wl.tile_pointers(channel, t, 0, 32, 64)
            here = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
            tl.store(out + here, tl.load(pointers, mask=inside))
            wl.release_tile(world, tasks, t, 1)
            t = wl.next_task(counter, n, num)
    elif role == wl.RELAY:
        wl.peer_tile_wait(world, channel, index, 1)
        wl.channel_wait_free(world, channel, 1)
    else:
        wl.peer_tile_notify(world, channel, index, 1)
        wl.release_tile_everywhere(world, tasks, index)
        wl.channel_advance(world, channel, 0, n)
