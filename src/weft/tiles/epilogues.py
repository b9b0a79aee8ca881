"""What is done to a product's tile on its way to memory: element by element, in registers.

    silu_mul      columns in pairs, gate and value: [m, 2 n] -> [m, n]
    store_tile    a tile of any width -> rows of a matrix

A product is rounded to the result's dtype first, as if it had been stored: so what is fused is what
is not. Functions with `chunk` in their name are the same for the template for Hopper, which hands
out a tile in chunks in shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Elements that a thread stores at once: 16 bytes of 16 bits.
VECTOR = gl.constexpr(8)


@triton.jit
def silu_mul(value, dtype: tl.constexpr):
    """silu(value[:, 0::2]) * value[:, 1::2], in fp32, of values rounded to dtype."""
    rounded = value.to(dtype).to(tl.float32)
    gate, up = rounded.reshape(value.shape[0], value.shape[1] // 2, 2).split()
    return gate * tl.sigmoid(gate) * up


@triton.jit
def silu(value, dtype: tl.constexpr):
    """value * sigmoid(value), in fp32, of values rounded to dtype."""
    rounded = value.to(dtype).to(tl.float32)
    return rounded * tl.sigmoid(rounded)


@triton.jit
def store_tile(c, row, column, value, num_rows, num_columns):
    """`value` -> C[num_rows, num_columns] from (row, column) on, as far as C reaches."""
    i = row + tl.arange(0, value.shape[0])
    j = column + tl.arange(0, value.shape[1])
    mask = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    pointers = c + i.to(tl.int64)[:, None] * num_columns + j[None, :]
    tl.store(pointers, value.to(c.dtype.element_ty), mask=mask)


@gluon.constexpr_function
def _layout(columns):
    """Rows of `columns` elements for four warps, a thread having VECTOR of them side by side."""
    across = columns // VECTOR.value
    return gl.BlockedLayout([1, VECTOR.value], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def silu_mul_chunk(chunk):
    """As `silu_mul`."""
    rows: gl.constexpr = chunk.shape[0]
    columns: gl.constexpr = chunk.shape[1]
    pairs: gl.constexpr = gl.BlockedLayout(
        [1, 2 * VECTOR], [32 // (columns // (2 * VECTOR)), columns // (2 * VECTOR)], [4, 1], [1, 0]
    )
    value = chunk.load(pairs).to(gl.float32)
    gate, up = value.reshape([rows, columns // 2, 2]).split()
    value = gate / (1 + gl.exp(-gate)) * up
    return gl.convert_layout(value, _layout(columns // 2))


@gluon.jit
def silu_chunk(chunk):
    """As `silu`."""
    value = chunk.load(_layout(chunk.shape[1])).to(gl.float32)
    return value / (1 + gl.exp(-value))


@gluon.jit
def store_chunk(c, row, column, value, num_rows, num_columns):
    """As `store_tile`; rows of C begin at multiples of VECTOR."""
    # Said by arithmetic, since a hint would not survive.
    num_columns = num_columns // VECTOR * VECTOR
    i = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    j = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    mask = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    pointers = c + i.to(gl.int64)[:, None] * num_columns + j[None, :]
    gl.store(pointers, value.to(c.dtype.element_ty), mask=mask)
