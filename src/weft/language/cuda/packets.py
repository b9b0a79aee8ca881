"""NVIDIA: packets, by relaxed 8-byte stores and loads: each is made at once."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import packets as declared
from weft.language import triton_api as api
from weft.language import world_layout as layout
from weft.language.addressing import translate
from weft.language.portable.give_up import leave_report
from weft.language.portable.packets import flag_of, is_late, pack, wait_for_all
from weft.language.registry import implement

# Polls are slower here than in `wait`: each ends with a reduction over the program.
LOOK_MASK = tl.constexpr(16383)


@implement(declared.put_packets, "cuda")
@triton.jit
def put_packets(world, dst, src, flag, to, mask):
    packets = pack(dst, src, flag, mask)
    words = translate(world, dst, to)
    if mask is None:
        api.assembly(
            "st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;", "=r,l,l,~{memory}", words, packets
        )
    else:
        api.assembly(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; }"
            " mov.u32 $0, 0;",
            "=r,l,l,r,~{memory}",
            words,
            packets,
            mask.to(tl.int32),
        )


@triton.jit
def read(packets, mask):
    if mask is None:
        return api.assembly(
            "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l,~{memory}", packets, dtype=tl.int64
        )
    else:
        return api.assembly(
            "mov.b64 $0, 0;"
            " { .reg .pred p; setp.ne.b32 p, $2, 0; @p ld.relaxed.sys.global.b64 $0, [$1]; }",
            "=&l,l,r,~{memory}",
            packets,
            mask.to(tl.int32),
            dtype=tl.int64,
        )


@triton.jit
def read_late(packets, seen, flag, mask):
    """Read again where a thread has not seen the flag itself.

    A tile with fewer elements than threads has replicas, each read by another thread; the loop
    may end on what one of them saw. Behind the barrier the others see it too.
    """
    if mask is None:
        return api.assembly(
            "{ .reg .pred p; .reg .b32 lo, hi; mov.b64 {lo, hi}, $2; setp.ne.b32 p, hi, $3;"
            " mov.b64 $0, $2; @p ld.relaxed.sys.global.b64 $0, [$1]; }",
            "=&l,l,l,r,~{memory}",
            packets,
            seen,
            flag,
            dtype=tl.int64,
        )
    else:
        return api.assembly(
            "{ .reg .pred p, q; .reg .b32 lo, hi; mov.b64 {lo, hi}, $2; setp.ne.b32 q, $4, 0;"
            " setp.ne.and.b32 p, hi, $3, q;"
            " mov.b64 $0, $2; @p ld.relaxed.sys.global.b64 $0, [$1]; }",
            "=&l,l,l,r,r,~{memory}",
            packets,
            seen,
            flag,
            mask.to(tl.int32),
            dtype=tl.int64,
        )


@triton.jit
def latest_clock_ns(tile):
    """A time on which all threads that loop together agree: they may not part at a barrier."""
    times = api.assembly("mov.u64 $0, %globaltimer; // $1", "=l,l,~{memory}", tile, dtype=tl.int64)
    return tl.max(times)


@triton.jit
def is_aborted(abort, tile):
    words = api.assembly(
        "ld.relaxed.sys.global.b32 $0, [$1]; // $2", "=r,l,l,~{memory}", abort, tile
    )
    return tl.max(words) != 0


@triton.jit
def wait_tile(packets, flag, world, mask, site):
    """Look at a tile of packets until each has its flag; the result is what the last look saw."""
    seen = read(packets, mask)
    if world is None:
        while tl.max(is_late(seen, flag, mask).to(tl.int32)) != 0:
            seen = read(packets, mask)
    else:
        failed = tl.cast(0, tl.int32)
        deadline = tl.cast(0, tl.int64)
        going = tl.max(is_late(seen, flag, mask).to(tl.int32))
        while going != 0:
            failed += 1
            seen = read(packets, mask)
            late = is_late(seen, flag, mask)
            going = tl.max(late.to(tl.int32))
            if (failed & LOOK_MASK) == 0:
                now = latest_clock_ns(seen)
                if deadline == 0:
                    deadline = now + tl.load(world.table + layout.TIMEOUT_NS)
                abort = tl.load(world.table + layout.ABORT_PTR).to(tl.pointer_type(tl.int32))
                aborted = is_aborted(abort, seen)
                if (going != 0) & (aborted | (now >= deadline)):
                    word = tl.max(tl.where(late, packets.to(tl.int64), 0))
                    flags = tl.max(tl.where(late, flag_of(seen), -(1 << 31)))
                    leave_report(word, flag, flags, world, abort, aborted, site)
                    going = tl.cast(0, tl.int32)
    tl.debug_barrier()
    seen = read_late(packets, seen, flag, mask)
    # All threads have read before any goes on: what it sends next says so.
    tl.debug_barrier()
    return seen


@implement(declared.wait_packets, "cuda")
@triton.jit
def wait_packets(packets, flag, world, mask, dtype, site):
    return wait_for_all(wait_tile, packets, flag, world, mask, dtype, site)
