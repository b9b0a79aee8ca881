"""Fragments: what a template hands its hooks of a tile, so that a hook has one source.

A hook is one `@triton.jit` function, called unchanged from the template in Triton (gemm.py) and
from the one in Gluon (gemm_sm90.py). The first hands it the whole tile, in registers. The second
hands it a chunk, which is some columns of one consumer's rows: to `combine` in registers, as wgmma
leaves it; to `emit` in shared memory, as TMA takes it. `Cells` says where a fragment lies.

In Gluon each tensor has a layout, so a hook makes no index tensor and moves no block by itself.
These functions are the only ones that know which of the two languages is compiled:

    index(value, axis)                   row or column numbers within a value, in its layout
    block_index(rows, columns)           the same of a block that is still to be loaded
    line_index(count)                    numbers of elements that lie side by side
    in_registers(fragment)               its value; a chunk comes in rows, 16 bytes a thread
    store_block(target, .., fragment)    by TMA where `target` is a descriptor, else by threads
    aligned(n)                           n, which in Gluon divides by 16 bytes

Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from weft.language import triton_api as api

# Elements that a thread moves at once: 16 bytes of 16 bits. Rows begin at multiples of them.
VECTOR = tl.constexpr(8)

# Triton 3.9 has another name for it than 3.7.
_store_by_tma = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Cells(NamedTuple):
    """Where a fragment lies. `row` and `column` are its first ones in the product, counted as if
    each tile were whole; `tile_row` is its first row within its tile. `starts` is a constant: is
    it the first of the fragments with these rows?

    Write it out in the call of a hook: Triton makes variables of a named tuple's constants.
    """

    row: Any
    column: Any
    tile_row: Any
    starts: Any


@triton.jit
def whole(at, tile):
    """Where a fragment lies that is a whole tile, for hooks that ask for no more than that."""
    return Cells(at.i_m * tile.m, at.i_n * tile.n, 0, True)


@api.builtin
def is_gluon(_semantic=None):
    return api.constexpr(api.is_gluon(_semantic))


@api.builtin
def is_pointer(target, _semantic=None):
    return api.constexpr(api.is_pointer(target))


@api.builtin
def is_in_shared_memory(fragment, _semantic=None):
    return api.constexpr(isinstance(fragment, gl.shared_memory_descriptor))


@gluon.constexpr_function
def layout_of_rows(columns, vector):
    """Rows of `columns` elements for four warps, a thread having `vector` of them side by side."""
    across = min(columns // vector, 16)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@triton.jit
def index(value, axis: tl.constexpr):
    """0, 1, ... along an axis of `value`, a tile in registers."""
    if is_gluon():
        i = gl.arange(0, value.shape[axis], gl.SliceLayout(1 - axis, value.type.layout))
    else:
        i = tl.arange(0, value.shape[axis])
    return i


@triton.jit
def block_index(rows: tl.constexpr, columns: tl.constexpr):
    """Row and column numbers of a block, for accesses of 16 bytes; in Gluon for four warps."""
    if is_gluon():
        layout: gl.constexpr = layout_of_rows(columns, VECTOR)
        i = gl.arange(0, rows, gl.SliceLayout(1, layout))
        j = gl.arange(0, columns, gl.SliceLayout(0, layout))
    else:
        i = tl.arange(0, rows)
        j = tl.arange(0, columns)
    return i, j


@triton.jit
def line_index(count: tl.constexpr):
    """0 .. count - 1, for accesses of 16 bytes."""
    if is_gluon():
        i = gl.arange(0, count, gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    else:
        i = tl.arange(0, count)
    return i


@triton.jit
def aligned(n):
    """`n`, a number of elements between rows, so that a compiler sees what it divides by."""
    if is_gluon():
        # By arithmetic, since a hint would not survive.
        n = n // VECTOR * VECTOR
    return n


@triton.jit
def in_registers(fragment, vector: tl.constexpr = VECTOR):
    """A fragment's value. Of a chunk each thread has `vector` elements side by side."""
    if is_in_shared_memory(fragment):
        value = fragment.load(layout_of_rows(fragment.shape[1], vector))
    else:
        value = fragment
    return value


@triton.jit
def in_rows(value):
    """`value` as `in_registers` gives it: so what was made of a chunk is stored 16 bytes wide."""
    if is_gluon():
        value = gl.convert_layout(value, layout_of_rows(value.shape[1], VECTOR))
    return value


@triton.jit
def store_block(target, row, column, fragment, num_rows, num_columns, stride):
    """Store a fragment at (row, column) of `target`[num_rows, num_columns], rounded, as far as
    that reaches. A descriptor knows how far; a pointer's rows lie `stride` elements apart."""
    if is_pointer(target):
        value = in_registers(fragment)
        j = column + index(value, 1)
        i = row + index(value, 0)
        mask = (i < num_rows)[:, None] & (j < aligned(num_columns))[None, :]
        there = target + i.to(tl.int64)[:, None] * aligned(stride) + j[None, :]
        tl.store(there, value.to(target.dtype.element_ty), mask=mask)
    elif is_in_shared_memory(fragment):
        _store_by_tma(target, [row, column], fragment)
    else:
        target.store([row, column], fragment.to(target.dtype))
