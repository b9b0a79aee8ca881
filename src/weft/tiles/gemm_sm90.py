"""The GEMM template for Hopper, in Gluon: the same product and hooks as tiles/gemm.py.

    producer, one warp          for its tiles: ready(...), then A and B by TMA, stage by stage
    two consumers, 4 warps each multiply (wgmma), round, store by TMA. Tiles of up to 128 columns
                                they have in turns: while one multiplies, the other stores. Wider
                                tiles they share, half of the rows each; and those of fp8

Where `ready` gives rows by index (gemm.Indexed), of which TMA fetches none, A is a pointer and the
producer has four warps: they copy A's rows, 16 bytes a thread at a time, and TMA brings B. Results
of tiles that end where another's rows begin are stored by threads: then C is a pointer as well.

Hooks are the very functions that the plain template takes. A wait in `ready` is the producer's,
before the first load of what it guards; the consumers go on. They hand out a tile chunk by chunk
(fragments.Cells says which one):

    combine(at, cells, value, args) -> value    in registers, as wgmma leaves it: fp32, scaled
    emit(at, cells, chunk, args)                in shared memory, as TMA takes it
    announce(at, part, args)                    by each consumer that has a part of the tile, when
                                                it has begun to store it; with `late` when it has
                                                multiplied the next. Its release completes the
                                                stores: what announces nothing waits for none

Which program does which tiles, and where several share one, each with a part of k, says
tiles/tile_scheduler.py. Those of part 1, 2, ... leave their sums in `partials`, part 0 adds them in
this order and emits the tile; so the result is the same each time. Of wide tiles that nothing
announces part 1 emits the right half of the columns: two programs add up and store at once.

A tile's columns are a power of two, or one and a rest of half or a quarter as many (160, 192, 320,
384): then a step is two products, and TMA moves its part of B in several blocks (`block_columns`).
Such tiles are for sizes of which one round is enough then, and with others a second would be
needed. Chunks of the result have 64 columns, of a tile of 160 but 32 (`chunk_columns`).

Operands come as TMA descriptors; fp8 with k in rows of both, as wgmma wants it. Sums are in fp32,
over k in order but for shared tiles. Tensor cores add fp8 products up with 14 bits: every step's
128 go into sums of the consumer's own, and are scaled on the way where each block has its scale.

The emulator runs this template where a call asks for it (docs/emulator.md): partitions, mbarriers
and what TMA and tensor cores do are checked there. What happens among the threads of a partition is
not; `weft.verify.compiled` reads that in the code after compilation.

Limits  tile_m 128, tile_n 64 to 384; of fp8 tile_n up to 128, tile_k 128; compute capability 9.0;
        extents as TMA takes them (tiles/blocking.py); all programs of a launch are resident at once
        where tiles are shared
Source  CUTLASS's ping-pong schedule for the turns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

import weft.language as wl
from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.tiles import tile_scheduler, tile_trace
from weft.tiles.blocking import Blocking
from weft.tiles.epilogue_sm90 import (
    Others,
    emit_halves,
    emit_one_tile,
    leave_sums,
    skip_rows,
)
from weft.tiles.gemm import Tile
from weft.tiles.load_sm90 import block_columns as block_columns
from weft.tiles.load_sm90 import load_one_tile, pace_words, paces_of
from weft.tiles.multiply_sm90 import multiply, multiply_promoted, wide_of

# Rows of its tiles.
TILE_M = gl.constexpr(128)
# Columns of its tiles, and extents of k, of 16-bit operands.
WIDTHS, DEPTHS = (64, 128, 160, 192, 256, 320, 384), (32, 64)
# Warps of a launch: the first consumer's. The other consumer and the producer are added to them.
NUM_WARPS = 4
# Registers of a thread: what a consumer needs for its sums, what a producer can do with.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
# Where rows lie by index four warps copy them, 16 bytes a thread at a time.
COPYING_THREADS = gl.constexpr(128)
CONSUMERS_BESIDE_COPIES = gl.constexpr(216)
COPYING_REGISTERS = gl.constexpr(72)
# Tiles and their stages in shared memory, beside two chunks of the result for each consumer.
TURNS = Blocking(128, 128, 64, NUM_WARPS, 5)
WIDE = Blocking(128, 256, 64, NUM_WARPS, 4)
# 160 registers of a consumer's threads are sums. On an H200, m 2048, n 2560, k 8192 is one round of
# them: 0.96 of cuBLAS's speed, in wide tiles and in turns 0.91. In many rounds wide ones are ahead.
WIDER = Blocking(128, 320, 64, NUM_WARPS, 3)
# Of n 2560 few rows are one round of them: m 512 and 1024, k 8192, 0.84 and 0.95 of cuBLAS's speed,
# in tiles of powers of two 0.79 and 0.89. In many rounds those are ahead, by 5 to 15 %.
MIDDLE = Blocking(128, 160, 64, NUM_WARPS, 5)
# Of fp8.
PROMOTED = Blocking(128, 128, 128, NUM_WARPS, 6)


class Shared(NamedTuple):
    """Where programs that share a tile meet.

    `partials` holds fp32 [programs, tile_m, tile_n]; `summed`, one int64 word for each half of each
    program's tile, is set to `e` when its sums are there: e is new for every launch. Of both a
    second one lies behind the first, for early tiles. `world` bounds the wait for a word.
    """

    partials: Any
    summed: Any
    e: Any
    world: Any


class Columns(NamedTuple):
    """Of a tile's columns: what there is of its first product's, and of the second's, or None."""

    wide: Any
    rest: Any


def chunk_rows(tile_m: int, tile_n: int, itemsize: int = 2) -> int:
    """Rows of a tile that one consumer has, and of the chunks that `emit` is given.

    All of them where its sums fit in registers, once; of fp8 it has two.
    """
    return tile_m if tile_m * tile_n * (3 - itemsize) <= 128 * 128 else tile_m // 2


_rows_each = gluon.constexpr_function(chunk_rows)


@gluon.constexpr_function
def chunk_columns(tile_n: int) -> int:
    """Columns of a tile's result that are stored at once; kernels ask for them too."""
    return 64 if tile_n % 64 == 0 else 32


def chunk_of(tile_m: int, tile_n: int, itemsize: int = 2) -> tuple[int, int]:
    """Rows and columns of the chunks that `emit` is given."""
    return chunk_rows(tile_m, tile_n, itemsize), chunk_columns(tile_n)


@gluon.jit
def gemm(
    a_block,
    b,
    c_block,
    shape,
    num_m,
    first,
    step,
    shared,
    tile_m: gl.constexpr,
    tile_n: gl.constexpr,
    tile_k: gl.constexpr,
    stages: gl.constexpr,
    chunk_n: gl.constexpr,
    b_is_nk: gl.constexpr,
    order: gl.constexpr,
    order_args,
    ready: gl.constexpr,
    ready_args,
    emit: gl.constexpr,
    emit_args,
    combine: gl.constexpr = None,
    combine_args=None,
    announce: gl.constexpr = None,
    announce_args=None,
    done: gl.constexpr = None,
    done_args=None,
    scales: gl.constexpr = None,
    scales_args=None,
    per_block: gl.constexpr = False,
    late: gl.constexpr = False,
    early=0,
    first_wave=1,
    by_index: gl.constexpr = False,
    slices=None,
):
    """Multiply this program's share of the tiles; a kernel of NUM_WARPS warps calls it.

    `num_m` counts rows of tiles; `first` of `step` is this program's place. `a_block` and
    `c_block` are descriptors whose blocks have the form in which `ready`'s sources are read and
    `emit` is given chunks, or pointers to their elements: A's where rows are read `by_index`.
    `shared` is a Shared. The first `early` tiles have `first_wave` programs each. Where k comes in
    `slices`, each of shape.k, `ready` is asked for one after the other.

    Sync    what the hooks do; programs that share a tile wait for each other
    """
    a_dtype: gl.constexpr = _element_of(a_block)
    c_dtype: gl.constexpr = _element_of(c_block)
    itemsize: gl.constexpr = a_dtype.primitive_bitwidth // 8
    gl.static_assert(itemsize == 2 or b_is_nk, "fp8: b must lie as [n, k]")
    a_layout: gl.constexpr = _layout_of(a_block, tile_m, tile_k)
    operands_a = gl.allocate_shared_memory(a_dtype, [stages, tile_m, tile_k], a_layout)
    wide: gl.constexpr = wide_of(tile_n)
    operands_b = Columns(_allocate_b(b, stages, wide, tile_k, b_is_nk), None)
    if tile_n > wide:
        rest = _allocate_b(b, stages, tile_n - wide, tile_k, b_is_nk)
        operands_b = Columns(operands_b.wide, rest)
    # Rows of a tile that one consumer has.
    rows: gl.constexpr = _rows_each(tile_m, tile_n, itemsize)
    c_layout: gl.constexpr = _layout_of(c_block, rows, chunk_n)
    chunks_0 = gl.allocate_shared_memory(c_dtype, [2, rows, chunk_n], c_layout)
    chunks_1 = gl.allocate_shared_memory(c_dtype, [2, rows, chunk_n], c_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(empty.index(i), count=tile_m // rows)
        mbarrier.init(full.index(i), count=1 + by_index * COPYING_THREADS)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    k = shape.k
    if slices is not None:  # each in whole steps
        k = slices * gl.cdiv(k, tile_k) * tile_k
    waves = tile_scheduler.split_waves(num_m, shape.n, k, tile_n, tile_k, step, early, first_wave)
    gl.warp_specialize(
        [
            (
                _consume,
                (operands_a, operands_b, chunks_0, empty, full, turns, waves, first, step,
                 shared, order, order_args, emit, emit_args, combine, combine_args, announce,
                 announce_args, late, scales, scales_args, per_block, 0, tile_m, tile_n, tile_k,
                 stages, chunk_n, b_is_nk, by_index, tile_trace.kept(shared)),
            ),
            (
                _consume,
                (operands_a, operands_b, chunks_1, empty, full, turns, waves, first, step,
                 shared, order, order_args, emit, emit_args, combine, combine_args, announce,
                 announce_args, late, scales, scales_args, per_block, 1, tile_m, tile_n, tile_k,
                 stages, chunk_n, b_is_nk, by_index, tile_trace.kept(shared)),
            ),
            (
                _produce,
                (b, shape, operands_a, operands_b, empty, full, waves, first, step, shared,
                 by_index, order, order_args, ready, ready_args, done, done_args, tile_m,
                 tile_n, tile_k, stages, b_is_nk, slices is not None, tile_trace.kept(shared)),
            ),
        ],
        [4, 4 if by_index else 1],
        [
            CONSUMERS_BESIDE_COPIES if by_index else CONSUMER_REGISTERS,
            COPYING_REGISTERS if by_index else PRODUCER_REGISTERS,
        ],
    )  # fmt: skip


@gluon.constexpr_function
def _element_of(operand):
    """The dtype of what a descriptor or a pointer leads to."""
    pointed = getattr(operand.dtype, "element_ty", None)
    return operand.dtype if pointed is None else pointed


@gluon.constexpr_function
def _layout_of(operand, rows, columns):
    """How its blocks lie in shared memory: a descriptor says it, pointers take the usual one."""
    if hasattr(operand, "layout"):
        return operand.layout
    return gl.NVMMASharedLayout.get_default_for([rows, columns], operand.dtype.element_ty)


@gluon.jit
def _allocate_b(b, stages: gl.constexpr, columns: gl.constexpr, tile_k: gl.constexpr,
                b_is_nk: gl.constexpr):  # fmt: skip
    if b_is_nk:
        shape: gl.constexpr = [stages, columns, tile_k]
    else:
        shape: gl.constexpr = [stages, tile_k, columns]
    return gl.allocate_shared_memory(b.dtype, shape, b.layout)


@gluon.jit
def _produce(
    b, shape, operands_a, operands_b, empty, full, waves, first, step, shared, paced: gl.constexpr,
    order: gl.constexpr, order_args, ready: gl.constexpr, ready_args, done: gl.constexpr, done_args,
    tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
    b_is_nk: gl.constexpr, sliced: gl.constexpr, traced,
):  # fmt: skip
    """Fill stage after stage with what the consumers multiply next."""
    filled = 0
    begins = tile_scheduler.first_unit(first, waves, step)
    ends = tile_scheduler.end_unit(waves, step)
    if paced:
        if begins == 0:
            _, before = pace_words(shared, step)
            gl.store(before, 0)  # its programs are over
    for unit in range(begins, ends, step):
        of = tile_scheduler.unit_of(unit, waves, step)
        at = order(of.tile, waves.num_m, waves.num_n, order_args)
        # weft: allow spin-without-acquire: programs keep pace there, and wait for no data
        filled = load_one_tile(
            at, of.begin, of.end, filled, b, shape, operands_a, operands_b, empty, full, ready,
            ready_args, tile_m, tile_n, tile_k, stages, b_is_nk, unit, unit < waves.whole,
            shared if paced else None, step, sliced, traced,
        )  # fmt: skip
    if paced:
        # Whoever has no tile of the last round is waited for as well.
        word, _ = pace_words(shared, step)
        if begins + (waves.whole - 1) // step * step >= waves.whole:
            # weft: equivalent-mutant value+1 of atomic: waits end early, and no data is behind them
            wl.atomic_add(word, paces_of(waves.num_k), order=wl.Order.RELAXED,
                          scope=wl.Scope.DEVICE)  # fmt: skip
    if done is not None:
        # Once every stage is empty again, all that was loaded has been read.
        for _ in range(stages):
            mbarrier.wait(empty.index(filled % stages), (filled // stages & 1) ^ 1)
            filled += 1
        done(done_args)


@gluon.jit
def _consume(
    operands_a, operands_b, chunks, empty, full, turns, waves, first, step, shared,
    order: gl.constexpr, order_args, emit: gl.constexpr, emit_args, combine: gl.constexpr,
    combine_args, announce: gl.constexpr, announce_args, late: gl.constexpr,
    scales: gl.constexpr, scales_args, per_block: gl.constexpr, me: gl.constexpr,
    tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
    chunk_n: gl.constexpr, b_is_nk: gl.constexpr, by_index: gl.constexpr, traced,
):  # fmt: skip
    """This consumer's part of this program's units: sums over k, then on to the hooks."""
    itemsize: gl.constexpr = operands_a.dtype.primitive_bitwidth // 8
    rows: gl.constexpr = _rows_each(tile_m, tile_n, itemsize)
    rest_n: gl.constexpr = tile_n - wide_of(tile_n)
    takes_turns: gl.constexpr = rows == tile_m
    begins = tile_scheduler.first_unit(first, waves, step)
    stride = step
    used = 0
    if takes_turns:
        # Only a program's first and last unit may have fewer than num_k steps.
        if me == 1:
            of = tile_scheduler.unit_of(begins, waves, step)
            used += of.end - of.begin
            begins += step
        stride = 2 * step
    own_row: gl.constexpr = 0 if takes_turns else me * rows
    # Its words by this, not by consumer: in turns, parts of a tile may be the first one's in one
    # program and the second one's in another.
    half: gl.constexpr = own_row // rows
    phase = 1 - me
    # In turns the other consumer multiplies meanwhile. Who is told of a tile is told of all of it.
    is_halved: gl.constexpr = announce is None and not takes_turns
    # The tile that was emitted last, where it is still to be announced.
    emitted = first * 0 - 1
    for unit in range(begins, tile_scheduler.end_unit(waves, step), stride):
        of = tile_scheduler.unit_of(unit, waves, step)
        if takes_turns:
            # Without turns a consumer could take a stage's earlier round for its own: parity is
            # all that a barrier tells.
            mbarrier.wait(turns.index(me), phase)
        if traced is not None:
            tile_trace.stamp(traced, unit, tile_trace.BEGUN + me * tile_trace.EACH)
        at = order(of.tile, waves.num_m, waves.num_n, order_args)
        tile = Tile(tile_m, tile_n, tile_k, b_is_nk, True, True)
        if itemsize == 1:
            scaled = None
            if scales is not None:
                scaled = skip_rows(scales(at, tile, scales_args), own_row)
            value, used = multiply_promoted(operands_a, operands_b.wide, empty, full, of.begin,
                                            of.end, used, own_row, rows, tile_n, stages, scaled,
                                            per_block)  # fmt: skip
        else:
            value, rest, used = multiply(operands_a, operands_b, empty, full, of.end - of.begin,
                                         used, own_row, rows, tile_n, stages, b_is_nk,
                                         by_index)  # fmt: skip
        if takes_turns:
            mbarrier.arrive(turns.index(1 - me), count=1)
        phase ^= 1
        if itemsize > 1:
            if rest_n:
                value, rest = warpgroup_mma_wait(0, deps=(value, rest))
            else:
                value = warpgroup_mma_wait(0, deps=(value,))
            mbarrier.arrive(empty.index((used + stages - 1) % stages), count=1)
        if takes_turns:
            used += waves.num_k
        if traced is not None:
            tile_trace.stamp(traced, unit, tile_trace.SUMMED + me * tile_trace.EACH)
        pitch = of.apart * (tile_m * tile_n)
        first_place = of.place - of.part * of.apart
        block = shared.partials + first_place * (tile_m * tile_n) + own_row * tile_n
        # Part 0 emits a shared tile; of a halved one part 1 emits the right half of columns.
        right_of = min(of.parts - 1, 1) if is_halved else 0
        if of.part + right_of > 0:
            leave_sums(block + of.part * pitch, value, rest if rest_n else None, of.part,
                        right_of, is_halved, tile_n)  # fmt: skip
            # weft: equivalent-mutant drop of complete_stores: sums are stored by threads
            wl.store(shared.summed + 2 * of.place + half, shared.e, order=wl.Order.RELEASE,
                     scope=wl.Scope.DEVICE)  # fmt: skip
        if of.part <= right_of:
            if late:
                # Before this tile's sums are waited for, and before its `combine`, which may wait
                # for what others announce likewise: of those that have the sums some may wait for
                # a peer's tile, and that peer for this one.
                _announce_late(emitted, own_row // rows, waves, order, order_args, announce,
                               announce_args)  # fmt: skip
                emitted = of.tile
            for other in range(of.parts):
                if other != of.part:
                    # Pairs with the store above, in the program that has that part.
                    wl.wait(shared.summed + 2 * (first_place + other * of.apart) + half, shared.e,
                            scope=wl.Scope.DEVICE, world=shared.world)  # fmt: skip
            others = Others(block, pitch, of.parts * min(of.parts - 1, 1), of.part)
            if is_halved:
                emit_halves(at, value, rest if rest_n else None, own_row, of.part == 0,
                            of.part == right_of, others, chunks, emit, emit_args, combine,
                            combine_args, None if per_block else scales, scales_args, tile,
                            chunk_n, traced, unit, me)  # fmt: skip
            else:
                emit_one_tile(at, value, rest if rest_n else None, own_row, others, chunks, emit,
                              emit_args, combine, combine_args, None if late else announce,
                              announce_args, None if per_block else scales, scales_args, tile,
                              chunk_n, traced, unit, me)  # fmt: skip
        if traced is not None:
            tile_trace.stamp(traced, unit, tile_trace.END + me * tile_trace.EACH)
    if late:
        _announce_late(emitted, own_row // rows, waves, order, order_args, announce, announce_args)
    # weft: equivalent-mutant drop of tma.store_wait in gemm_ar_multiply_sm90: every tile has been
    # announced, by a release that has completed its stores
    tma.store_wait(0)


@gluon.jit
def _announce_late(
    i, part: gl.constexpr, waves, order: gl.constexpr, order_args, announce: gl.constexpr,
    announce_args,
):  # fmt: skip
    """What this consumer has of tile i of the order is announced; nothing for i = -1."""
    if i >= 0:
        announce(order(i, waves.num_m, waves.num_n, order_args), part, announce_args)


def has_tile(tile: Sequence[int]) -> bool:
    """Does this template take such tiles of 16-bit operands?"""
    tile_m, tile_n, tile_k = tile
    return tile_m == TILE_M.value and tile_n in WIDTHS and tile_k in DEPTHS


def check(
    op: str, tile_m: int, tile_n: int, tile_k: int, stages: int, target: Target, itemsize: int = 2
) -> None:
    """Raises  ConfigError: a tile or stages that this template, or `target`, cannot run"""
    widths, depths = WIDTHS, DEPTHS
    if itemsize == 1:
        widths, depths = (64, 128), (128,)
    if tile_m != TILE_M.value or tile_n not in widths or tile_k not in depths:
        raise ConfigError(
            f"{op}: tile {tile_m} x {tile_n} x {tile_k}; the template for Hopper takes tile_m=128, "
            f"tile_n={_either(widths)}, tile_k={_either(depths)} of {itemsize}-byte operands"
        )
    most = most_stages(tile_m, tile_n, tile_k, target, itemsize)
    if not 2 <= stages <= most:
        operands = (tile_m + tile_n) * tile_k * itemsize
        chunks = _chunk_bytes(tile_m, tile_n, itemsize)
        raise ConfigError(
            f"{op}: num_stages={stages} of {operands} bytes beside {chunks} bytes of results; "
            f"{target} has {target.shared_bytes} bytes of shared memory: take 2 to {most}"
        )


def most_stages(tile_m: int, tile_n: int, tile_k: int, target: Target, itemsize: int = 2) -> int:
    """How many stages of a tile's operands fit there."""
    barriers = 1024
    left = target.shared_bytes - _chunk_bytes(tile_m, tile_n, itemsize) - barriers
    return left // ((tile_m + tile_n) * tile_k * itemsize)


def _chunk_bytes(tile_m: int, tile_n: int, itemsize: int) -> int:
    """Of both consumers' chunks of the result, two each."""
    return 2 * 2 * chunk_rows(tile_m, tile_n, itemsize) * chunk_columns(tile_n) * 2


def _either(numbers: Sequence[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
