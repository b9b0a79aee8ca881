"""Small Gluon kernels, right as they are; each fault that `fault` names is planted at its line.

A line below `# name` is one that tests look for.
"""

import inspect
import sys

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import weft

# Triton 3.9 has other names for these.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def descriptor(tensor, block, tile=None):
    """Of blocks of `tensor`; `tile` is what several of them make up in shared memory."""
    kind = {torch.float16: gl.float16, torch.float32: gl.float32}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(tile or block), kind)
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def line_in(module, name):
    """The number of the line below the one that is marked so."""
    lines = inspect.getsource(module).splitlines()
    return [text.strip() for text in lines].index(f"# {name}") + 2


def line(name):
    return line_in(sys.modules[__name__], name)


def emulate(main, seed=0):
    """The findings of `main` on one rank, by kind and lines, and its result."""
    with weft.emulated(ranks=1, seed=seed, collect=True) as ranks:
        (result,) = ranks.run(main)
    return ranks.report.findings, result


def sides(finding):
    return {side.place.outermost.line for side in finding.sides}


@triton.constexpr_function
def _register_layout(dtype, shape, layout, num_warps):
    kind = blackwell.tensor_memory_descriptor_type(dtype, list(shape), layout, list(shape))
    return kind.get_reg_layout(num_warps=num_warps)


# How threads hold tensor memory of a kind; Triton 3.9 asks the memory instead.
register_layout = getattr(blackwell, "get_tmem_reg_layout", _register_layout)


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def pipelined_copy(source, target, n, stages: gl.constexpr, fault: gl.constexpr):
    """Tiles in by TMA, doubled by threads, out by TMA; `stages` loads under way."""
    block_m: gl.constexpr = source.block_type.shape[0]
    block_n: gl.constexpr = source.block_type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    tiles = gl.allocate_shared_memory(source.dtype, [stages, block_m, block_n], source.layout)
    result = gl.allocate_shared_memory(target.dtype, [block_m, block_n], target.layout)
    full = _barriers(stages, 1)
    for i in gl.static_range(stages):
        mbarrier.expect(full.index(i), source.block_type.nbytes)
        # copy: first loads
        load_tile(source, [i * block_m, 0], full.index(i), tiles.index(i))
    for i in range(n):
        stage = i % stages
        phase = i // stages & 1
        if fault == "parity":
            phase = phase ^ 1
        # copy: waits
        mbarrier.wait(full.index(stage), phase)
        if fault == "early":
            mbarrier.expect(full.index(stage), source.block_type.nbytes)
            # copy: early
            load_tile(source, [(i + stages) * block_m, 0], full.index(stage), tiles.index(stage))
        # copy: reads
        values = tiles.index(stage).load(layout)
        if fault != "early":
            nbytes: gl.constexpr = source.block_type.nbytes * (1 + (fault == "bytes"))
            mbarrier.expect(full.index(stage), nbytes)
            load_tile(source, [(i + stages) * block_m, 0], full.index(stage), tiles.index(stage))
        # copy: writes
        result.store(values * 2)
        if fault != "fence":
            fence_async_shared()
        # copy: stores
        store_tile(target, [i * block_m, 0], result)
        if fault != "store wait":
            tma.store_wait(0)
    for i in gl.static_range(stages):
        mbarrier.wait(full.index((n + i) % stages), (n + i) // stages & 1)
        if fault != "invalidate":
            mbarrier.invalidate(full.index((n + i) % stages))


@gluon.jit
def copy_by_own_descriptors(x, out, m, n, row, block: gl.constexpr, layout: gl.constexpr):
    """One block from `row` on; descriptors are made in the kernel, of rows of n elements."""
    shape: gl.constexpr = [block, block]
    source = tma.make_tensor_descriptor(x, [m, n], [n, 1], shape, layout)
    target = tma.make_tensor_descriptor(out, [m, n], [n, 1], shape, layout)
    tile = gl.allocate_shared_memory(source.dtype, shape, layout)
    full = _barriers(1, 1)
    mbarrier.expect(full.index(0), source.block_type.nbytes)
    load_tile(source, [row, 0], full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    store_tile(target, [row, 0], tile)
    tma.store_wait(0)


@gluon.jit
def pipelined_gemm(a, b, c, k, fault: gl.constexpr):
    """One tile of c = a @ b, two stages; a product is under way while the next is loaded."""
    tile_m: gl.constexpr = a.block_type.shape[0]
    tile_k: gl.constexpr = a.block_type.shape[1]
    tile_n: gl.constexpr = b.block_type.shape[1]
    nbytes: gl.constexpr = a.block_type.nbytes + b.block_type.nbytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_n, 16]
    )
    left = gl.allocate_shared_memory(a.dtype, [2, tile_m, tile_k], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [2, tile_k, tile_n], b.layout)
    result = gl.allocate_shared_memory(c.dtype, [tile_m, tile_n], c.layout)
    full = _barriers(2, 1)
    steps = (k + tile_k - 1) // tile_k
    mbarrier.expect(full.index(0), nbytes)
    load_tile(a, [0, 0], full.index(0), left.index(0))
    load_tile(b, [0, 0], full.index(0), right.index(0))
    sums = warpgroup_mma_init(gl.zeros((tile_m, tile_n), gl.float32, layout))
    left_over: gl.constexpr = 1 if fault == "refill" else 0
    for i in range(steps):
        stage = i % 2
        mbarrier.wait(full.index(stage), i // 2 & 1)
        # The product before must have read the stage that is filled now.
        sums = warpgroup_mma_init(warpgroup_mma_wait(left_over, deps=(sums,)))
        if i + 1 < steps:
            mbarrier.expect(full.index(1 - stage), nbytes)
            # gemm: refills
            load_tile(a, [0, (i + 1) * tile_k], full.index(1 - stage), left.index(1 - stage))
            load_tile(b, [(i + 1) * tile_k, 0], full.index(1 - stage), right.index(1 - stage))
        # gemm: multiplies
        sums = warpgroup_mma(left.index(stage), right.index(stage), sums, is_async=True)
    last: gl.constexpr = 1 if fault == "mma wait" else 0
    value = warpgroup_mma_wait(last, deps=(sums,))
    # gemm: uses
    result.store(value.to(c.dtype))
    fence_async_shared()
    store_tile(c, [0, 0], result)
    tma.store_wait(0)


@gluon.jit
def product_of_registers(a, b, c, twice: gl.constexpr):
    """c[64, 16] = a[64, 32] @ b[32, 16] with a in registers; waited for at once, or added up."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    blocked: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 16], gl.float16)
    rows = gl.arange(0, 64, gl.SliceLayout(1, operand))[:, None]
    left = gl.load(a + rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, operand))[None, :])
    k = gl.arange(0, 32, gl.SliceLayout(1, blocked))[:, None]
    columns = gl.arange(0, 16, gl.SliceLayout(0, blocked))[None, :]
    right = gl.allocate_shared_memory(gl.float16, [32, 16], shared, gl.load(b + k * 16 + columns))
    fence_async_shared()
    sums = gl.full((64, 16), 7.0, gl.float32, layout)
    sums = warpgroup_mma(left, right, sums, use_acc=False)
    if twice:
        sums = warpgroup_mma(left, right, sums)
    right._keep_alive()
    at = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * 16
    gl.store(c + at + gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :], sums)


@gluon.jit
def _load_tiles(source, tiles, full, empty, n, stages: gl.constexpr, fault: gl.constexpr):
    for i in range(n):
        stage = i % stages
        parity = (i // stages & 1) ^ 1
        if fault == "first parity":
            parity = parity ^ 1
        # partitions: waits for room
        mbarrier.wait(empty.index(stage), parity)
        if fault != "no expect":
            mbarrier.expect(full.index(stage), source.block_type.nbytes)
        row = i * source.block_type.shape[0]
        # partitions: loads
        load_tile(source, [row, 0], full.index(stage), tiles.index(stage))


@gluon.jit
def _store_tiles(target, tiles, full, empty, n, n_columns, stages: gl.constexpr,
                 fault: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    tile_m: gl.constexpr = tiles.shape[1]
    rows = gl.arange(0, tile_m, gl.SliceLayout(1, layout))
    columns = gl.arange(0, tiles.shape[2], gl.SliceLayout(0, layout))
    for i in range(n):
        stage = i % stages
        # partitions: waits for tiles
        mbarrier.wait(full.index(stage), i // stages & 1)
        if fault == "credit before":
            mbarrier.arrive(empty.index(stage), count=1)
        # partitions: reads
        values = tiles.index(stage).load(layout)
        if fault == "two credits":
            # partitions: two credits
            mbarrier.arrive(empty.index(stage), count=2)
        elif fault != "credit before" and fault != "no credit":
            mbarrier.arrive(empty.index(stage), count=1)
        at = target + (i * tile_m + rows)[:, None] * n_columns + columns[None, :]
        gl.store(at, values * 2, mask=columns[None, :] < n_columns)


@gluon.jit
def specialised_copy(source, target, n, n_columns, stages: gl.constexpr, fault: gl.constexpr):
    """One warp loads tiles by TMA, four store them doubled, by threads."""
    shape: gl.constexpr = source.block_type.shape
    tiles = gl.allocate_shared_memory(source.dtype, [stages, shape[0], shape[1]], source.layout)
    full = _barriers(stages, 1)
    empty = _barriers(stages, 1)
    gl.warp_specialize(
        [
            (_store_tiles, (target, tiles, full, empty, n, n_columns, stages, fault)),
            (_load_tiles, (source, tiles, full, empty, n, stages, fault)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _announce_rounds(tile, barriers, rounds, layout: gl.constexpr, fault: gl.constexpr):
    value = gl.arange(0, 128, layout)
    for i in range(rounds):
        if fault != "no answer":
            # rounds: waits for the answer
            mbarrier.wait(barriers.index(1), (i & 1) ^ 1)
        # rounds: writes
        tile.store(value + i)
        mbarrier.arrive(barriers.index(0), count=1)


@gluon.jit
def _read_rounds(out, tile, barriers, rounds, layout: gl.constexpr, fault: gl.constexpr):
    for i in range(rounds):
        if fault != "no wait":
            # rounds: waits for the round
            mbarrier.wait(barriers.index(0), i & 1)
        # rounds: reads
        gl.store(out + i * 128 + gl.arange(0, 128, layout), tile.load(layout))
        mbarrier.arrive(barriers.index(1), count=1)


@gluon.jit
def rounds_of_a_pair(out, rounds, fault: gl.constexpr):
    """One partition writes a tile of 128 numbers in each round, the other one reads it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.int32, [128], shared)
    barriers = _barriers(2, 1)
    gl.warp_specialize(
        [
            (_read_rounds, (out, tile, barriers, rounds, layout, fault)),
            (_announce_rounds, (tile, barriers, rounds, layout, fault)),
        ],
        [4],
        [40],
    )


@gluon.jit
def _load_operands(a, b, left, right, full, empty, steps, stages: gl.constexpr):
    tile_k: gl.constexpr = a.block_type.shape[1]
    for i in range(steps):
        stage = i % stages
        mbarrier.wait(empty.index(stage), (i // stages & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.block_type.nbytes + b.block_type.nbytes)
        # mma: loads a
        load_tile(a, [0, i * tile_k], full.index(stage), left.index(stage))
        load_tile(b, [i * tile_k, 0], full.index(stage), right.index(stage))


@gluon.jit
def _multiply(c, left, right, result, full, empty, steps, stages: gl.constexpr,
              fault: gl.constexpr):  # fmt: skip
    tile_m: gl.constexpr = left.shape[1]
    tile_n: gl.constexpr = right.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_n, 16]
    )
    sums = warpgroup_mma_init(gl.zeros((tile_m, tile_n), gl.float32, layout))
    for i in range(steps):
        stage = i % stages
        mbarrier.wait(full.index(stage), i // stages & 1)
        # mma: multiplies
        sums = warpgroup_mma(left.index(stage), right.index(stage), sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
        if fault == "own credit":
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            # The product before this one is over.
            mbarrier.arrive(empty.index((i + stages - 1) % stages), count=1, pred=i > 0)
    value = warpgroup_mma_wait(0, deps=(sums,))
    result.store(value.to(c.dtype))
    fence_async_shared()
    store_tile(c, [0, 0], result)
    tma.store_wait(0)


@gluon.jit
def specialised_gemm(a, b, c, k, stages: gl.constexpr, fault: gl.constexpr):
    """One tile of c = a @ b: a warp loads, a warp group multiplies."""
    tile_m: gl.constexpr = a.block_type.shape[0]
    tile_k: gl.constexpr = a.block_type.shape[1]
    tile_n: gl.constexpr = b.block_type.shape[1]
    left = gl.allocate_shared_memory(a.dtype, [stages, tile_m, tile_k], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [stages, tile_k, tile_n], b.layout)
    result = gl.allocate_shared_memory(c.dtype, [tile_m, tile_n], c.layout)
    full = _barriers(stages, 1)
    empty = _barriers(stages, 1)
    steps = (k + tile_k - 1) // tile_k
    gl.warp_specialize(
        [
            (_multiply, (c, left, right, result, full, empty, steps, stages, fault)),
            (_load_operands, (a, b, left, right, full, empty, steps, stages)),
        ],
        [1],
        [40],
    )
