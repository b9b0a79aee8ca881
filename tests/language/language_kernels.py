"""Kernels that use every primitive, and how to compile them for a target."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

import weft.language as wl
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api

GPUS = tuple(name for name in TARGETS if name != "emu")
CUDA = tuple(name for name in GPUS if name.startswith("cuda"))
HIP = tuple(name for name in GPUS if name.startswith("hip"))
BULK = ("cuda:90", "cuda:100")

WORLD = ("*i64", "constexpr", "constexpr")
SLOT = ("*i64", "*i32", "*i64")
TYPES = {
    "world": WORLD,
    "slot": SLOT,
    "x": "*fp32",
    "out": "*fp32",
    "flags": "*i32",
    "flags64": "*i64",
    "counter": "*i32",
    "n": "i32",
}


@functools.cache
def compiled(kernel, target: str, num_ranks: int = 4, **options):
    """`kernel`, whose parameters are named as in TYPES or are flags that become True."""
    constants = {
        name: True for name in kernel.arg_names if name not in TYPES and name != "constexpr"
    }
    world = wl.WorldArg(None, num_ranks, wl.language_version())
    record = KernelRecord(
        name=kernel.__name__,
        signature={name: TYPES[name] for name in kernel.arg_names if name in TYPES},
        constants={"world": world, "slot": wl.SlotArg(None, None, None), **constants},
        options=dict(options),
        divisible_by_16=("x", "out"),
    )
    return triton_api.compile_kernel(kernel, record, TARGETS[target])


def text(kernel, target: str, stage: str, **options) -> str:
    """One stage of it, without locations and comments."""
    lines = compiled(kernel, target, **options).asm[stage].splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith((".loc", "//", "#loc")))


def machine_text(kernel, target: str, **options) -> str:
    return text(kernel, target, "ptx" if target.startswith("cuda") else "amdgcn", **options)


@triton.jit
def notify_peer(world, flags, peer):
    wl.notify(world, flags + peer, to=peer, op=wl.SignalOp.SET)


@triton.jit
def world_and_signals(world, x, flags, flags64, n):
    i = tl.arange(0, 1024)
    v = tl.load(x + i)
    rank = wl.rank(world)
    for peer in range(wl.num_ranks(world)):
        notify_peer(world, flags, peer)
    wl.notify(world, flags64, n, to=(rank + 1) % wl.num_ranks(world), scope=wl.Scope.DEVICE)
    wl.notify(world, flags64, to=0, order=wl.Order.RELAXED)
    wl.notify_all(world, flags64 + rank, n, op=wl.SignalOp.SET)
    wl.wait(flags, 1, wl.num_ranks(world))
    wl.wait(flags64, n, n, order=wl.Order.RELAXED)
    if wl.is_near(world, 1):
        place = wl.rank(world) + wl.node(world)
        tl.store(wl.at(world, x + i, 1), v + place)
    while not wl.test(flags, 7):
        wl.complete_stores()


@triton.jit
def one_sided(world, x, out, flags, n):
    i = tl.arange(0, 1024)
    v = tl.load(x + i)
    wl.put(world, out + i, v, to=1)
    wl.put(world, out + i, x + i, to=2, mask=i < n)
    wl.get(world, x + i, out + i, source=3)
    wl.get(world, x + i, out + i, source=n, mask=i < n)
    wl.put_signal(world, out + i, v, flags, to=0)
    wl.put_signal(world, out, 1.0, flags, 2, to=0, op=wl.SignalOp.ADD, scope=wl.Scope.DEVICE)


@triton.jit
def ordered(x, flags, flags64):
    a = wl.load(flags) + wl.load(flags, order=wl.Order.ACQUIRE, scope=wl.Scope.DEVICE)
    wl.store(flags, a)
    wl.store(flags64, a, order=wl.Order.RELEASE)
    wl.store(x, wl.load(x) + 1.5)
    b = wl.atomic_add(flags, 1) + wl.atomic_exchange(flags + 1, a, order=wl.Order.RELAXED)
    i = tl.arange(0, 256)
    c = wl.atomic_add(x + i, 1.0, order=wl.Order.RELAXED)
    tl.store(x + i, c + b)


@triton.jit
def announce(world, x, flags64):
    tl.store(x + tl.arange(0, 1024), 1.0)
    wl.notify(world, flags64, 1, to=0, op=wl.SignalOp.SET)


@triton.jit
def compare_and_swap(flags):
    wl.store(flags + 1, wl.atomic_cas(flags, 0, 1, scope=wl.Scope.DEVICE))


@triton.jit
def barriers(world, counter):
    wl.barrier(world)
    wl.barrier(world, 63)
    wl.barrier_grid(counter)


@triton.jit
def slots(world, slot, x):
    e = wl.slot_epoch(slot)
    wl.slot_wait_free(world, slot, e)
    tl.store(x + tl.arange(0, 256), 1.0)
    wl.slot_finish(world, slot, e, tl.num_programs(0))


@triton.jit
def publish(world, x, out, flags):
    i = tl.arange(0, 1024)
    tl.store(wl.at(world, out + i, 1), tl.load(x + i))
    wl.notify(world, flags, to=1)


@triton.jit
def publish_to_all(world, x, out, flags):
    i = tl.arange(0, 1024)
    wl.put(world, out + i, x + i, to=1)
    wl.notify_all(world, flags)


@triton.jit
def observe(world, x, out, flags):
    i = tl.arange(0, 1024)
    wl.wait(flags, at_least=3)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def observe_unbounded(x, out, flags):
    i = tl.arange(0, 1024)
    wl.wait(flags, at_least=3)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def _gemm(world, x, out, flags, n, WAIT: tl.constexpr):
    """A persistent loop over tiles with a wait in it, around a pipelined K loop."""
    rows = tl.arange(0, 64)
    for tile in tl.range(tl.program_id(0), n, tl.num_programs(0), flatten=False):
        if WAIT:
            wl.wait(flags + tile, at_least=1)
        acc = tl.zeros((64, 64), tl.float32)
        a = x + (tile * 64 + rows[:, None]) * 512 + rows[None, :]
        for k in tl.range(0, 512, 64, num_stages=3):
            block = tl.load(a + k).to(tl.bfloat16)
            acc = tl.dot(block, block, acc)
        tl.store(out + (tile * 64 + rows[:, None]) * 64 + rows[None, :], acc)


@triton.jit
def gemm(world, x, out, flags, n):
    _gemm(world, x, out, flags, n, True)


@triton.jit
def gemm_without_wait(world, x, out, flags, n):
    _gemm(world, x, out, flags, n, False)


@triton.jit
def gemm_tma(world, x, out, flags, n):
    """The same as _gemm with descriptors, and a notify after each asynchronous store."""
    source = tl.make_tensor_descriptor(x, [n * 64, 512], [512, 1], [64, 64])
    target = tl.make_tensor_descriptor(out, [n * 64, 64], [64, 1], [64, 64])
    for tile in tl.range(tl.program_id(0), n, tl.num_programs(0), flatten=False):
        wl.wait(flags + tile, at_least=1)
        acc = tl.zeros((64, 64), tl.float32)
        for k in tl.range(0, 512, 64, num_stages=3):
            block = source.load([tile * 64, k]).to(tl.bfloat16)
            acc = tl.dot(block, block, acc)
        target.store([tile * 64, 0], acc)
        wl.notify(world, flags + tile, to=1)


@triton.jit
def time_a_wait(x, out, flags, flags64):
    i = tl.arange(0, 1024)
    start = wl.timestamp()
    wl.wait(flags, 1)
    waited = wl.timestamp() - start
    tl.store(out + i, tl.load(x + i) + 1)
    tl.store(flags64, waited)
    tl.store(flags64 + 1, wl.timestamp() - start)


ALL = (
    world_and_signals,
    one_sided,
    ordered,
    compare_and_swap,
    barriers,
    slots,
    gemm,
    time_a_wait,
)
