"""Kernels for the post-compile check: correct ones, and one for each known trap.

Marks at the ends of lines (`# mark: name`) are where findings must point.
"""

from __future__ import annotations

import functools
from pathlib import Path

import triton
import triton.language as tl
from effort import slow_but
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.verify import CompiledReport, compiled

GPUS = tuple(name for name in TARGETS if name != "emu")
CUDA = tuple(name for name in GPUS if name.startswith("cuda"))
BULK = ("cuda:90", "cuda:100")
# For parametrize: Triton's passes for cuda:100 and gfx950 treat these kernels as those before them.
EVERY = ("target",), slow_but([("cuda:80",), ("cuda:90",), ("hip:gfx942",)], zip(GPUS))
NVIDIA = ("target",), slow_but([("cuda:80",), ("cuda:90",)], zip(CUDA))

TYPES = {
    "world": ("*i64", "constexpr", "constexpr"),
    "a": "*bf16",
    "b": "*bf16",
    "c": "*bf16",
    "signal": "*i32",
    "counter": "*i32",
    "m": "i32",
    "n": "i32",
    "k": "i32",
}
TILES = {"TILE_M": 128, "TILE_N": 128, "TILE_K": 64}


def line_of(mark: str) -> int:
    """The line of this file that ends in `# mark: mark`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# mark: {mark}")]
    return number


@functools.cache
def build(kernel, target: str, *, num_warps: int = 0, **constants):
    """`kernel` compiled with arguments named as in TYPES and TILES."""
    world = wl.WorldArg(None, 4, wl.language_version())
    values = {**TILES, "world": world, **constants}
    record = KernelRecord(
        name=kernel.__name__,
        signature={name: TYPES[name] for name in kernel.arg_names if name in TYPES},
        constants={name: values[name] for name in kernel.arg_names if name in values},
        options={"num_warps": num_warps or (4 if target == "cuda:80" else 8)},
        divisible_by_16=tuple(name for name in TYPES if name != "world"),
    )
    return triton_api.compile_kernel(kernel, record, TARGETS[target])


def check(kernel, target: str, **options) -> CompiledReport:
    return compiled(build(kernel, target, **options), target)


# ---------------------------------------------------------------------------------------------
# Waits


@triton.jit
def spin(word):
    while tl.atomic_add(word, 0, sem="acquire", scope="sys") < 1:  # mark: atomic poll
        pass


PTX_SPIN = tl.constexpr("""{
    .reg .pred %p<2>; .reg .u32 %t; .reg .b32 %v;
    mov.u32 %t, %tid.x; setp.ne.u32 %p0, %t, 0; @%p0 bra DONE_${:uid};
    LOOP_${:uid}: ld.acquire.sys.global.b32 %v, [$1];
    setp.lt.s32 %p1, %v, $2; @%p1 bra LOOP_${:uid};
    DONE_${:uid}: bar.sync 0; mov.u32 $0, 0; }""")


@triton.jit
def asm_spin(word, PURE: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX_SPIN, "=r,l,r,~{memory}", [word, 1], dtype=tl.int32, is_pure=PURE, pack=1
    )


@triton.jit
def wait_by(word, HOW: tl.constexpr):
    if HOW == "atomic":
        spin(word)
    elif HOW == "atomic, barrier":
        spin(word)
        tl.debug_barrier()
    elif HOW == "cas":
        while tl.atomic_cas(word, 1, 1, sem="acquire", scope="sys") != 1:  # mark: cas poll
            pass
    elif HOW == "volatile":
        while tl.load(word, volatile=True) < 1:  # mark: volatile poll
            pass
    elif HOW == "asm":
        asm_spin(word, False)
    elif HOW == "asm, barrier":
        asm_spin(word, False)
        tl.debug_barrier()
    elif HOW == "pure asm":
        asm_spin(word, True)
    elif HOW == "one look":
        tl.atomic_add(word, 0, sem="acquire", scope="sys")


# ---------------------------------------------------------------------------------------------
# A GEMM in the shapes that matter


@triton.jit
def pointers(
    a, b, c, signal, m, n, k,
    HOW: tl.constexpr, IN_LOOP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One tile per program; the wait before the K loop, or in it."""
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    rows = i_m * TILE_M + tl.arange(0, TILE_M)
    columns = i_n * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    a_ptrs = a + rows[:, None] * k + depth[None, :]
    b_ptrs = b + depth[:, None] * n + columns[None, :]
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    if not IN_LOOP:
        wait_by(signal + i_m, HOW)  # mark: wait before the loop
    for i in tl.range(0, tl.cdiv(k, TILE_K), num_stages=3):
        if IN_LOOP:
            wait_by(signal + i, HOW)  # mark: wait in the loop
        x = tl.load(a_ptrs)  # mark: load of a
        y = tl.load(b_ptrs)
        acc = tl.dot(x, y, acc)
        a_ptrs += TILE_K
        b_ptrs += TILE_K * n
    tl.store(c + rows[:, None] * n + columns[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def persistent(
    a, b, c, signal, m, n, k,
    HOW: tl.constexpr, FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr,
    BULK_STORE: tl.constexpr, NOTIFY: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Tiles in a loop, the wait in it, descriptors inside, a notify by hand at the end."""
    a_desc = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    b_desc = tl.make_tensor_descriptor(b, [n, k], [k, 1], [TILE_N, TILE_K])
    c_desc = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    tiles_n = tl.cdiv(n, TILE_N)
    num_tiles = tl.cdiv(m, TILE_M) * tiles_n
    for tile in tl.range(
        tl.program_id(0), num_tiles, 132,
        flatten=FLATTEN, num_stages=3, warp_specialize=SPECIALIZE,
    ):  # fmt: skip
        i_m = tile // tiles_n
        i_n = tile % tiles_n
        wait_by(signal + i_m, HOW)  # mark: persistent wait
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for i in tl.range(0, tl.cdiv(k, TILE_K)):
            x = a_desc.load([i_m * TILE_M, i * TILE_K])  # mark: descriptor load
            y = b_desc.load([i_n * TILE_N, i * TILE_K])
            acc = tl.dot(x, y.T, acc)
        if BULK_STORE:
            c_desc.store([i_m * TILE_M, i_n * TILE_N], acc.to(c.dtype.element_ty))  # mark: bulk
        else:
            rows = i_m * TILE_M + tl.arange(0, TILE_M)
            columns = i_n * TILE_N + tl.arange(0, TILE_N)
            out = c + rows[:, None] * n + columns[None, :]
            tl.store(out, acc.to(c.dtype.element_ty))  # mark: tile store
        if NOTIFY == "bare":
            tl.atomic_add(signal + 64 + i_m, 1, sem="release", scope="sys")  # mark: bare
        elif NOTIFY == "barrier":
            tl.debug_barrier()
            tl.atomic_add(signal + 64 + i_m, 1, sem="release", scope="sys")  # mark: behind barrier


SAFE = {
    "HOW": "atomic, barrier",
    "FLATTEN": False,
    "SPECIALIZE": False,
    "BULK_STORE": False,
    "NOTIFY": "barrier",
}


# ---------------------------------------------------------------------------------------------
# weft's primitives


@triton.jit
def fused(
    a, b, c, signal, world, m, n, k,
    BULK_LOAD: tl.constexpr, BULK_STORE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A persistent GEMM between a wait and a push to a peer."""
    a_desc = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    b_desc = tl.make_tensor_descriptor(b, [n, k], [k, 1], [TILE_N, TILE_K])
    c_desc = tl.make_tensor_descriptor(c, [m, n], [n, 1], [TILE_M, TILE_N])
    tiles_n = tl.cdiv(n, TILE_N)
    num_tiles = tl.cdiv(m, TILE_M) * tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, 132, flatten=False):
        i_m = tile // tiles_n
        i_n = tile % tiles_n
        peer = i_m % world.num_ranks
        rows = i_m * TILE_M + tl.arange(0, TILE_M)
        columns = i_n * TILE_N + tl.arange(0, TILE_N)
        depth = tl.arange(0, TILE_K)
        wl.wait(signal + i_m, 1, world=world)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for i in range(tl.cdiv(k, TILE_K)):
            if BULK_LOAD:
                x = a_desc.load([i_m * TILE_M, i * TILE_K])
                y = b_desc.load([i_n * TILE_N, i * TILE_K])
            else:
                offsets = i * TILE_K + depth
                x = tl.load(a + rows[:, None] * k + offsets[None, :])
                y = tl.load(b + columns[:, None] * k + offsets[None, :])
            acc = tl.dot(x, y.T, acc)
        if BULK_STORE:
            c_desc.store([i_m * TILE_M, i_n * TILE_N], acc.to(c.dtype.element_ty))
        else:
            out = wl.at(world, c, peer) + rows[:, None] * n + columns[None, :]
            tl.store(out, acc.to(c.dtype.element_ty))  # mark: fused store
        wl.notify(world, signal + 64 + i_m, to=peer)


@triton.jit
def primitives(a, c, signal, counter, world, n):
    """Everything that is not in `fused`."""
    i = tl.arange(0, 1024)
    wl.barrier(world)
    v = tl.load(a + i)
    wl.put(world, c + i, v, to=1)
    wl.put_signal(world, c + 1024 + i, a + i, signal, to=2, mask=i < n)
    wl.get(world, a + 1024 + i, c + i, source=3)
    wl.wait(signal, 1, wl.num_ranks(world))
    tl.store(wl.at(world, c + 2048 + i, 1), tl.load(a + 2048 + i))
    wl.store(signal + 1, wl.load(signal + 2, order=wl.Order.ACQUIRE), order=wl.Order.RELEASE)
    wl.atomic_add(signal + 3, 1)
    wl.atomic_exchange(signal + 4, 1, order=wl.Order.RELEASE)
    while not wl.test(signal + 5, 7):
        wl.complete_stores()
    tl.store(c + 4096 + i, tl.load(a + 4096 + i))
    wl.notify(world, signal + 6, n, to=0, op=wl.SignalOp.SET)
    wl.barrier_grid(counter)


# ---------------------------------------------------------------------------------------------
# Small kernels


@triton.jit
def unrolled_waits(a, c, signal, n):
    """One source line, four waits, each before its own load."""
    i = tl.arange(0, 1024)
    total = tl.zeros((1024,), tl.float32)
    for rank in tl.static_range(4):
        wait_by(signal + rank, "atomic, barrier")
        total += tl.load(a + rank * 1024 + i)
    tl.store(c + i, total.to(c.dtype.element_ty))


@triton.jit
def waits_in_branches(a, c, signal, n):
    i = tl.arange(0, 1024)
    if n > 7:
        wait_by(signal, "atomic, barrier")
    else:
        wait_by(signal + 1, "atomic, barrier")
    tl.store(c + i, tl.load(a + i))


@triton.jit
def early_return(a, c, signal, n):
    if tl.program_id(0) >= n:
        return
    i = tl.arange(0, 1024)
    wait_by(signal, "atomic, barrier")
    tl.store(c + i, tl.load(a + i))
    tl.debug_barrier()
    tl.atomic_xchg(signal + 1, 1, sem="release", scope="sys")


@triton.jit
def lock(a, c, signal):
    """Wait and release on one word, by compare-and-swap and exchange."""
    i = tl.arange(0, 1024)
    while tl.atomic_cas(signal, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    tl.debug_barrier()
    tl.store(c + i, tl.load(a + i))
    tl.debug_barrier()
    tl.atomic_xchg(signal, 0, sem="release", scope="gpu")


@triton.jit
def many_words_in_one_loop(a, c, signal, n):
    i = tl.arange(0, 1024)
    reached = 0
    while reached < n:
        if tl.atomic_add(signal + reached, 0, sem="acquire", scope="sys") >= 1:
            reached += 1
    tl.debug_barrier()
    tl.store(c + i, tl.load(a + i))


@triton.jit
def last_one_reduces(a, c, counter, n):
    """A ticket: release and acquire in one atomic, and a pipelined loop behind it."""
    i = tl.arange(0, 1024)
    tl.store(c + tl.program_id(0) * 1024 + i, tl.load(a + i))
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == tl.num_programs(0) - 1:
        total = tl.zeros((1024,), tl.float32)
        for row in tl.range(0, n, num_stages=3):
            total += tl.load(c + row * 1024 + i)
        tl.store(c + i, total.to(c.dtype.element_ty))


@triton.jit
def work_counter(a, c, counter, n):
    """A loop driven by an atomic that is no wait."""
    i = tl.arange(0, 1024)
    tile = tl.atomic_add(counter, 1, sem="relaxed")
    while tile < n:
        tl.store(c + tile * 1024 + i, tl.load(a + tile * 1024 + i))
        tile = tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def split_k(a, b, c, m, n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """Partial sums by atomics with Triton's default order: releases that publish nothing."""
    rows, columns, depth = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    first = tl.program_id(0) * TILE_K
    x = tl.load(a + rows[:, None] * k + (first + depth)[None, :])
    y = tl.load(b + (first + depth)[:, None] * n + columns[None, :])
    out = c.to(tl.pointer_type(tl.float32), bitcast=True) + rows[:, None] * n + columns[None, :]
    tl.store(c + rows, rows.to(c.dtype.element_ty))
    tl.atomic_add(out, tl.dot(x, y))


@triton.jit
def shared_word(a, c, signal):
    """Wait and release on one word whose address is the argument itself."""
    i = tl.arange(0, 4096)
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.debug_barrier()
    tl.store(c + i, tl.load(a + i))  # mark: unseen store
    tl.atomic_add(signal, 1, sem="release", scope="sys")  # mark: bare release


@triton.jit
def asm_release(a, c, signal, HOW: tl.constexpr, TEXT: tl.constexpr):
    """Publish by assembly: with or without a barrier of the block before it."""
    i = tl.arange(0, 4096)
    tl.store(c + i, tl.load(a + i))
    if HOW == "barrier":
        tl.debug_barrier()
    constraints: tl.constexpr = "=r,l,~{memory}"
    tl.inline_asm_elementwise(TEXT, constraints, [signal], tl.int32, False, 1)  # mark: asm release


@gluon.jit
def gluon_copy(a, c, signal, HOW: gl.constexpr):
    """A Gluon kernel: it has no TTIR."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 1024, layout)
    while gl.atomic_add(signal, 0, sem="acquire", scope="sys") < 1:
        pass
    gl.thread_barrier()
    gl.store(c + i, gl.load(a + i))  # mark: gluon store
    if HOW == "barrier":
        gl.thread_barrier()
    gl.atomic_xchg(signal + 1, 1, sem="release", scope="sys")  # mark: gluon release


@triton.jit
def reused_signal(a, c, signal, HOW: tl.constexpr):
    """Copy, with a wait of its own between two loads of the same place."""
    i = tl.arange(0, 1024)
    first = tl.load(a + i)
    wait_by(signal, HOW)
    second = tl.load(a + i)
    tl.store(c + i, first + second)
