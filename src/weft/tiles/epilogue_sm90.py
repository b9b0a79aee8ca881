"""What becomes of a consumer's sums in the template for Hopper (gemm_sm90.py): to the program that
has the tile, or chunk by chunk to the hooks.

Not a template: four warps of it call these, with sums in registers as wgmma leaves them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from weft.tiles import tile_trace
from weft.tiles.fragments import Cells
from weft.tiles.gemm import Scales

# Sums of another program that are read at once, 64 registers of a consumer's threads.
ADDED = gl.constexpr(128 * 64)


class Others(NamedTuple):
    """Sums of a tile's parts: `count` blocks of fp32, `pitch` elements apart, of which number `own`
    is not looked at; none where `count` is 0."""

    first: Any
    pitch: Any
    count: Any
    own: Any


@gluon.jit
def leave_sums(block, value, rest, part, right_of, is_halved: gl.constexpr, tile_n: gl.constexpr):
    """Sums of a shared tile for who emits them, where that is not this part itself."""
    wide: gl.constexpr = value.shape[1]
    if is_halved:
        left, right = _halves(value)
        if part != 0:
            gl.store(places_of_sums(block, left, tile_n), left)
        if part != right_of:
            gl.store(places_of_sums(block + 4 * wide, right, tile_n), right)
    elif part != 0:
        gl.store(places_of_sums(block, value, tile_n), value)
    if rest is not None:
        if part != right_of:
            gl.store(places_of_sums(block + 8 * wide, rest, tile_n), rest)


@gluon.jit
def _halves(value):
    """Left and right columns: each thread keeps its own, nothing moves."""
    half: gl.constexpr = layout_of(value.shape[1] // 2)
    pairs = value.reshape([value.shape[0], 2, value.shape[1] // 2])
    left, right = pairs.permute(0, 2, 1).split()
    left = gl.convert_layout(left, half, assert_trivial=True)
    return left, gl.convert_layout(right, half, assert_trivial=True)


@gluon.constexpr_function
def layout_of(value_n, itemsize=2):
    """Where wgmma leaves the sums of a consumer's warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, value_n, 32 // itemsize]
    )


@gluon.jit
def skip_rows(scaled, rows):
    """Scales of a tile's rows from `rows` on."""
    return Scales(scaled.a + rows * scaled.a_row, scaled.b, scaled.rows - rows, scaled.columns,
                  scaled.a_row, scaled.a_k, scaled.b_column, scaled.b_k)  # fmt: skip


@gluon.jit
def scales_of_rows(scaled, block_k, value):
    """Scales of A for the rows of `value`."""
    row = gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    there = scaled.a + row * scaled.a_row + block_k * scaled.a_k
    return gl.load(there, mask=row < scaled.rows, other=0.0)


@gluon.jit
def scales_of_columns(scaled, inside, value):
    """Scales of B for the columns of `value`, which begins at column `inside` of its tile."""
    column = inside + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    return gl.load(scaled.b + column * scaled.b_column, mask=column < scaled.columns, other=0.0)


@gluon.jit
def emit_one_tile(
    at, value, rest, own_row: gl.constexpr, others, chunks, emit: gl.constexpr, emit_args,
    combine: gl.constexpr, combine_args, announce: gl.constexpr, announce_args,
    scales: gl.constexpr, scales_args, tile, chunk_n: gl.constexpr, traced=None, unit=0,
    me: gl.constexpr = 0,
):  # fmt: skip
    """The consumers' body behind the sums: rows own_row, ... of one tile to the hooks."""
    scaled = None
    if scales is not None:
        scaled = scales(at, tile, scales_args)
    row = at.i_m * tile.m + own_row
    left_column = at.i_n * tile.n
    columns: gl.constexpr = value.shape[1] + (0 if rest is None else rest.shape[1])
    first_left: gl.constexpr = _stores_left(columns, chunk_n)
    _emit_chunks(at, value, row, left_column, own_row, 0, True, others, chunks, emit, emit_args,
                 combine, combine_args, scaled, columns, chunk_n, first_left, traced, unit,
                 me)  # fmt: skip
    if rest is not None:
        wide: gl.constexpr = value.shape[1]
        _emit_chunks(at, rest, row, left_column, own_row, wide, True, others, chunks, emit,
                     emit_args, combine, combine_args, scaled, columns, chunk_n, first_left,
                     traced, unit, me)  # fmt: skip
    if announce is not None:
        # Its release waits until the chunks have been written, `store_wait` until they may be
        # reused.
        # weft: equivalent-mutant incomplete of notify: tiles that go to others by TMA are announced
        # late; these are stored by threads
        announce(at, own_row // value.shape[0], announce_args)


@gluon.jit
def emit_halves(
    at, value, rest, own_row: gl.constexpr, is_left, is_right, others, chunks, emit: gl.constexpr,
    emit_args, combine: gl.constexpr, combine_args, scales: gl.constexpr, scales_args, tile,
    chunk_n: gl.constexpr, traced, unit, me: gl.constexpr,
):  # fmt: skip
    """The same of the left half of the columns, of the right one, or of both; nobody is told."""
    scaled = None
    if scales is not None:
        scaled = scales(at, tile, scales_args)
    row = at.i_m * tile.m + own_row
    left_column = at.i_n * tile.n
    half: gl.constexpr = value.shape[1] // 2
    left, right = _halves(value)
    # The tile before may have left any chunk last.
    tma.store_wait(0)
    if is_left:
        # weft: equivalent-mutant drop of tma.store_wait: these are two chunks at most, and behind
        # the wait above both places are free
        _emit_chunks(at, left, row, left_column, own_row, 0, True, others, chunks, emit, emit_args,
                     combine, combine_args, scaled, tile.n, chunk_n, 1, traced, unit,
                     me)  # fmt: skip
    if is_right:
        _emit_chunks(at, right, row, left_column, own_row, half, True, others, chunks, emit,
                     emit_args, combine, combine_args, scaled, tile.n, chunk_n, 1, traced, unit,
                     me, half)  # fmt: skip
        if rest is not None:
            _emit_chunks(at, rest, row, left_column, own_row, 2 * half, True, others, chunks, emit,
                         emit_args, combine, combine_args, scaled, tile.n, chunk_n, 1, traced, unit,
                         me, half)  # fmt: skip


@gluon.jit
def _emit_chunks(
    at, value, row, left_column, own_row: gl.constexpr, inside: gl.constexpr, lacks: gl.constexpr,
    others, chunks, emit: gl.constexpr, emit_args, combine: gl.constexpr, combine_args, scaled,
    tile_n, chunk_n: gl.constexpr, first_left: gl.constexpr, traced, unit, me: gl.constexpr,
    begins: gl.constexpr = 0,
):  # fmt: skip
    """Halve the columns until they are a chunk.

    `inside` is the first column of `value` within its tile; it `lacks` the others' sums, or not.
    Of those that the caller emits the first column is `begins`.
    """
    tile_m: gl.constexpr = value.shape[0]
    value_n: gl.constexpr = value.shape[1]
    # As many at once as registers hold beside the sums.
    adds: gl.constexpr = lacks and tile_m * value_n <= ADDED
    if adds:
        for other in range(others.count):
            if other != others.own:
                there = others.first + other * others.pitch + inside * 8
                value += gl.load(places_of_sums(there, value, tile_n))
    if value_n > chunk_n:
        half: gl.constexpr = value_n // 2
        still: gl.constexpr = lacks and not adds
        left, right = _halves(value)
        _emit_chunks(at, left, row, left_column, own_row, inside, still, others, chunks, emit,
                     emit_args, combine, combine_args, scaled, tile_n, chunk_n, first_left,
                     traced, unit, me, begins)  # fmt: skip
        _emit_chunks(at, right, row, left_column, own_row, inside + half, still, others, chunks,
                     emit, emit_args, combine, combine_args, scaled, tile_n, chunk_n, first_left,
                     traced, unit, me, begins)  # fmt: skip
    else:
        if scaled is not None:
            value = value * scales_of_columns(scaled, inside, value)[None, :]
        if combine is not None:
            value = combine(
                at,
                Cells(row, left_column + inside, own_row, inside == begins),
                value,
                combine_args,
            )
            if traced is not None:
                # It waits at the tile's first chunk.
                if inside == 0:
                    tile_trace.stamp(traced, unit, tile_trace.COMBINED + me * tile_trace.EACH)
        # Of two buffers the one that was stored from before last.
        if inside >= 2 * chunk_n:
            tma.store_wait(1)
        else:
            # weft: equivalent-mutant drop of tma.store_wait in gemm_ar_multiply_sm90: these chunks
            # are the tile's first in each buffer, and every tile before was announced, by a release
            # that has completed its stores
            tma.store_wait(first_left if inside == 0 else 1)
        chunk = chunks.index(inside // chunk_n % 2)
        chunk.store(value.to(chunks.dtype))
        # weft: equivalent-mutant drop of fence_async_shared in ag_moe_multiply_sm90: experts' tiles
        # end where another's rows begin, so threads store them, and no TMA reads the chunk
        fence_async_shared()
        emit(at, Cells(row, left_column + inside, own_row, inside == 0), chunk, emit_args)


@gluon.constexpr_function
def _stores_left(columns, chunk_n):
    """Stores that may be under way when a tile's first chunk is written: of an odd number of chunks
    the last one of the tile before lies there."""
    return 0 if columns // chunk_n % 2 else 1


@gluon.jit
def places_of_sums(block, value, tile_n):
    """Pointers for the sums of a tile of `tile_n` columns: squares of 8 x 8 lie one behind another,
    so that what a warp has of one, eight rows, is two lines of memory instead of eight."""
    row = gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    of_row = row // 8 * (8 * tile_n) + row % 8 * 8
    of_column = column // 8 * 64 + column % 8
    return block + of_row[:, None] + of_column[None, :]
