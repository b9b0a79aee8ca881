"""What is done to a product's tile on its way to memory: element by element, in registers.

    silu          value * sigmoid(value)
    silu_mul      columns in pairs, gate and value: [m, 2 n] -> [m, n]
    mul, add      with the same elements of a matrix
    store_tile    a tile of any width -> rows of a matrix

Each rounds to the result's dtype first what it is given, as if that had been stored: so what is
fused is what is not. Functions with `chunk` in their name are the same for the template for Hopper,
which hands out a tile in chunks in shared memory; `load_chunk` makes a value of one.
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
def _cells(x, row, column, value, num_rows, num_columns):
    """Pointers to x[num_rows, num_columns] for the elements of `value`, and which there are."""
    i = row + tl.arange(0, value.shape[0])
    j = column + tl.arange(0, value.shape[1])
    mask = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    return x + i.to(tl.int64)[:, None] * num_columns + j[None, :], mask


@triton.jit
def mul(x, row, column, value, num_rows, num_columns):
    """value, rounded, * x[num_rows, num_columns] from (row, column) on."""
    pointers, mask = _cells(x, row, column, value, num_rows, num_columns)
    other = tl.load(pointers, mask=mask, other=0.0)
    return value.to(x.dtype.element_ty).to(tl.float32) * other.to(tl.float32)


@triton.jit
def add(x, row, column, value, num_rows, num_columns):
    """value, rounded, + x[num_rows, num_columns] from (row, column) on."""
    pointers, mask = _cells(x, row, column, value, num_rows, num_columns)
    other = tl.load(pointers, mask=mask, other=0.0)
    return value.to(x.dtype.element_ty).to(tl.float32) + other.to(tl.float32)


@triton.jit
def store_tile(c, row, column, value, num_rows, num_columns):
    """`value` -> C[num_rows, num_columns] from (row, column) on, as far as C reaches."""
    pointers, mask = _cells(c, row, column, value, num_rows, num_columns)
    tl.store(pointers, value.to(c.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------
# Chunk by chunk


@gluon.constexpr_function
def layout_of_rows(columns, vector):
    """Rows of `columns` elements for four warps, a thread having `vector` of them side by side."""
    across = min(columns // vector, 16)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def load_chunk(chunk):
    """A chunk's value in fp32; a thread has pairs of columns."""
    return chunk.load(layout_of_rows(chunk.shape[1], 2 * VECTOR)).to(gl.float32)


@gluon.jit
def silu_mul_chunk(value, dtype: gl.constexpr):
    """As `silu_mul`."""
    rows: gl.constexpr = value.shape[0]
    columns: gl.constexpr = value.shape[1] // 2
    gate, up = value.to(dtype).to(gl.float32).reshape([rows, columns, 2]).split()
    layout: gl.constexpr = layout_of_rows(columns, VECTOR)
    return gl.convert_layout(gate / (1 + gl.exp(-gate)) * up, layout)


@gluon.jit
def silu_chunk(value, dtype: gl.constexpr):
    """As `silu`."""
    rounded = value.to(dtype).to(gl.float32)
    return rounded / (1 + gl.exp(-rounded))


@gluon.jit
def _chunk_cells(x, row, column, value, num_rows, num_columns):
    """As `_cells`; rows of x begin at multiples of VECTOR."""
    # Said by arithmetic, since a hint would not survive.
    num_columns = num_columns // VECTOR * VECTOR
    i = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    j = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    mask = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    return x + i.to(gl.int64)[:, None] * num_columns + j[None, :], mask


@gluon.jit
def mul_chunk(x, row, column, value, num_rows, num_columns):
    """As `mul`."""
    pointers, mask = _chunk_cells(x, row, column, value, num_rows, num_columns)
    other = gl.load(pointers, mask=mask, other=0.0)
    return value.to(x.dtype.element_ty).to(gl.float32) * other.to(gl.float32)


@gluon.jit
def add_chunk(x, row, column, value, num_rows, num_columns):
    """As `add`."""
    pointers, mask = _chunk_cells(x, row, column, value, num_rows, num_columns)
    other = gl.load(pointers, mask=mask, other=0.0)
    return value.to(x.dtype.element_ty).to(gl.float32) + other.to(gl.float32)


@gluon.jit
def store_chunk(c, row, column, value, num_rows, num_columns):
    """As `store_tile`."""
    pointers, mask = _chunk_cells(c, row, column, value, num_rows, num_columns)
    gl.store(pointers, value.to(c.dtype.element_ty), mask=mask)
