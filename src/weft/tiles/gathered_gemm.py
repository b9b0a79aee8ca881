"""The product for small m of rows that all ranks have, in one launch: LL packets bring the rows.

    each program   sends its piece of the own rows to all ranks as packets, and waits for the same
                   piece of theirs (packets.py); leaves all of them in `gathered`, says so
                   waits until all programs here have; multiplies its share (gemm_small.py)

No slot and no credit: boxes of packets are free by the exchange's own rule, and all else is this
rank's alone, whose calls come one after the other.

Signals
    words      [programs, 2, ranks, block]  packets; flagged with their program's step
    unpacked   local: counts programs whose piece is in `gathered`, call after call: full at
               calls * programs. `calls` is kept by each program for itself
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import exchange, gemm, gemm_small, mailboxes, move, packets


class Unpacked(NamedTuple):
    """Arguments of `_ready`; tuples last, no constant: Triton 3.6 would forget those behind it."""

    rows: Any
    m: Any
    unpacked: Any
    full: Any
    world: Any


@triton.jit
def _ready(at, segment, tile, args):
    """Every program here has left its piece. args: Unpacked"""
    # Pairs with gathered_gemm's notify.
    wl.wait(args.unpacked, args.full, scope=wl.Scope.DEVICE, world=args.world)
    return gemm.Rows(source=args.rows, first=at.i_m * tile.m, end=args.m)


@triton.jit
def gathered_gemm(a, gathered, rows, b, c, words, steps, calls, unpacked, sums, come, shape, shards,
                 tile, world, width: tl.constexpr, sources: tl.constexpr,
                 block: tl.constexpr):  # fmt: skip
    """`rows` and `b` are what is multiplied: descriptors, or pointers. `shards` cut the gathered
    bytes."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program) + 1
    shards = move.rounded(shards, 1)
    own = move.size_of(shards, wl.rank(world))
    # weft: equivalent-mutant peer+1 of at: every rank gets the same packets, in another order
    packets.exchange(
        world, mailboxes.PacketBoxes(steps, words), packets.tiles_of(shards.shard, block),
        packets.part_of_all, exchange.Whole(a, own),
        packets.gather, exchange.Gathered(a, gathered, shards), width, sources, block,
    )  # fmt: skip
    # weft: equivalent-mutant swap, incomplete of notify: what comes last before it is this
    # program's own count of steps, and no store is asynchronous
    wl.notify(world, unpacked, 1, to=wl.rank(world), op=wl.SignalOp.ADD, scope=wl.Scope.DEVICE)
    m = tl.cast(shape.m, tl.int32)
    # All programs are resident: a launch has no more than `most_resident`.
    gemm_small.gemm_small(
        b, shape, tile, gemm_small.Partials(sums, come), program, num_programs,
        _ready, Unpacked(rows, m, unpacked, call * num_programs, world),
        gemm.emit_store, gemm.Stored(c, shape),
    )  # fmt: skip
    tl.store(calls + program, call)
