"""Message passing whose data is a block: by vectors, by TMA or by a copy engine, each way.

A writer and a reader answer each other through one flag and one acknowledgement: in round i the
writer fills the block with i and raises the flag to i; the reader counts elements that are not i.
Lines are used again and again, so that a stale copy in any cache would be found.

`bare_*` leave out what the primitives contain (a proxy fence, the completion of TMA stores): they
show what goes wrong without, and that this harness can see it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

import weft.language as wl

ROWS = tl.constexpr(64)
COLS = tl.constexpr(32)
LIMIT_NS = tl.constexpr(3_000_000_000)


@triton.jit
def bare_wait(word, at_least):
    """An acquire and the block barrier, without the proxy fence; bounded."""
    began = globaltimer()
    while (tl.atomic_add(word, 0, sem="acquire", scope="sys") < at_least) & (
        globaltimer() - began < LIMIT_NS
    ):
        pass
    tl.debug_barrier()


@triton.jit
def bare_notify(word, value):
    """The block barrier and a release, without completing asynchronous stores."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def exchange_blocks(world, data, data_desc, peer_desc, flags, acks, errors, is_writer, peer, rounds,
                    WRITE: tl.constexpr, READ: tl.constexpr, NOTIFY: tl.constexpr,
                    WAIT: tl.constexpr, AT_WRITER: tl.constexpr, WITHIN: tl.constexpr,
                    TALL: tl.constexpr):  # fmt: skip
    """One pair of programs per lane. `peer_desc` describes the reader's blocks, for TMA stores."""
    program = tl.program_id(0)
    lane = program
    writes = is_writer != 0
    if WITHIN:
        lane = program // 2
        writes = program % 2 == 0
    at = (lane * TALL + tl.arange(0, TALL))[:, None] * COLS + tl.arange(0, COLS)[None, :]
    flag = flags + lane * 32
    ack = acks + lane * 32
    bad = tl.zeros((TALL, COLS), tl.int32)
    if writes:
        for i in range(1, rounds + 1):
            block = tl.full((TALL, COLS), 0, tl.int32) + i
            if WRITE == "tma":
                peer_desc.store([lane * TALL, 0], block)
            elif AT_WRITER:
                tl.store(data + at, block)
            else:
                tl.store(wl.at(world, data + at, peer), block)
            if NOTIFY == "bare":
                bare_notify(wl.at(world, flag, peer), i)
            elif NOTIFY == "relaxed":
                wl.notify(world, flag, i, to=peer, op=wl.SignalOp.SET, order=wl.Order.RELAXED)
            else:
                wl.notify(world, flag, i, to=peer, op=wl.SignalOp.SET)
            wl.wait(ack, i, world=world)
    else:
        for i in range(1, rounds + 1):
            if WAIT == "bare":
                bare_wait(flag, i)
            elif WAIT == "relaxed":
                wl.wait(flag, i, world=world, order=wl.Order.RELAXED)
            else:
                wl.wait(flag, i, world=world)
            if READ == "tma":
                got = data_desc.load([lane * TALL, 0])
            elif AT_WRITER:
                got = tl.load(wl.at(world, data + at, peer))
            else:
                got = tl.load(data + at)
            bad += (got != i).to(tl.int32)
            wl.notify(world, ack, i, to=peer, op=wl.SignalOp.SET)
        tl.atomic_add(errors, tl.sum(tl.sum(bad, 1), 0), sem="relaxed")


@triton.jit
def fill_round(world, source, counter, acks, announce, to, n, READERS: tl.constexpr,
               BLOCK: tl.constexpr, TELL: tl.constexpr):  # fmt: skip
    """Writer's stream: once all readers have read round i - 1, fill the source with i.

    The last program (its ticket is counter[2]) sets counter[0] to i: what the copy engine sends.
    With TELL it announces i to rank `to`, whose stream pulls.
    """
    i = tl.load(counter) + 1
    for reader in range(READERS):
        wl.wait(acks + reader * 32, i - 1, world=world)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(source + at, tl.full((BLOCK,), 0, tl.int32) + i.to(tl.int32), mask=at < n)
    done = wl.atomic_add(counter + 2, 1, scope=wl.Scope.DEVICE) + 1
    if done == tl.num_programs(0):
        wl.store(counter + 2, 0, scope=wl.Scope.DEVICE)
        tl.store(counter, i)
        if TELL:
            wl.notify(world, announce, i, to=to, op=wl.SignalOp.SET)


@triton.jit
def await_round(world, counter, announce):
    """Reader's copy stream: wait until the writer has announced the next round."""
    i = tl.load(counter) + 1
    wl.wait(announce, i, world=world)
    tl.store(counter, i)


@triton.jit
def read_rounds(world, data, desc, flag, acks, errors, peer, rounds, n, READ: tl.constexpr,
                WAIT: tl.constexpr):  # fmt: skip
    """Reader: programs share the buffer; each reads its part from the end, where data is last."""
    program = tl.program_id(0)
    part = n // tl.num_programs(0)
    rows = part // COLS // ROWS
    bad = tl.zeros((ROWS, COLS), tl.int32)
    for i in range(1, rounds + 1):
        if WAIT == "bare":
            bare_wait(flag, i)
        elif WAIT == "relaxed":
            wl.wait(flag, i, world=world, order=wl.Order.RELAXED)
        else:
            wl.wait(flag, i, world=world)
        for step in range(rows):
            row = (program * rows + rows - 1 - step) * ROWS
            if READ == "tma":
                got = desc.load([row, 0])
            else:
                at = (row + tl.arange(0, ROWS))[:, None] * COLS + tl.arange(0, COLS)[None, :]
                got = tl.load(data + at)
            bad += (got != i).to(tl.int32)
        wl.notify(world, acks + program * 32, i, to=peer, op=wl.SignalOp.SET)
    tl.atomic_add(errors, tl.sum(tl.sum(bad, 1), 0), sem="relaxed")
