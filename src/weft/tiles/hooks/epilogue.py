"""What is done to a product's tile on its way to memory: element by element, in registers.

    silu          value * sigmoid(value)
    silu_mul      columns in pairs, gate and value: [m, 2 n] -> [m, n]
    mul, add      with the same elements of a matrix
    store         a tile of any width -> rows of a matrix

Each rounds to the result's dtype first what it is given, as if that had been stored: so what is
fused is what is not. `load` makes a value of the fragment that `emit` is given; behind `silu_mul`
it lies in half as many columns (`halved`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import fragments

# Elements of a chunk that a thread has side by side: what `silu_mul` leaves of them is 16 bytes.
_PAIRS = tl.constexpr(2 * fragments.VECTOR.value)


@triton.jit
def load(fragment):
    """A fragment's value in fp32; a thread has pairs of columns."""
    return fragments.in_registers(fragment, _PAIRS).to(tl.float32)


@triton.jit
def silu_mul(value, dtype: tl.constexpr):
    """silu(value[:, 0::2]) * value[:, 1::2], in fp32, of values rounded to dtype."""
    rounded = value.to(dtype).to(tl.float32)
    gate, up = rounded.reshape(value.shape[0], value.shape[1] // 2, 2).split()
    return fragments.in_rows(gate / (1 + tl.exp(-gate)) * up)


@triton.jit
def half(columns):
    """How many columns `silu_mul` leaves."""
    return columns // 2


@triton.jit
def silu(value, dtype: tl.constexpr):
    """value * sigmoid(value), in fp32, of values rounded to dtype."""
    rounded = value.to(dtype).to(tl.float32)
    return rounded / (1 + tl.exp(-rounded))


@triton.jit
def halved(cells):
    """Where a fragment lies whose columns `silu_mul` has halved."""
    return fragments.Cells(cells.row, cells.column // 2, cells.tile_row, cells.starts)


@triton.jit
def _other(x, cells, value, num_rows, num_columns):
    """The elements of x[num_rows, num_columns] where those of `value` lie, in fp32."""
    num_columns = fragments.aligned(num_columns)
    i = cells.row + fragments.index(value, 0)
    j = cells.column + fragments.index(value, 1)
    mask = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    there = x + i.to(tl.int64)[:, None] * num_columns + j[None, :]
    return tl.load(there, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def mul(x, cells, value, num_rows, num_columns):
    """value, rounded, * x[num_rows, num_columns] where it lies."""
    other = _other(x, cells, value, num_rows, num_columns)
    return value.to(x.dtype.element_ty).to(tl.float32) * other


@triton.jit
def add(x, cells, value, num_rows, num_columns):
    """value, rounded, + x[num_rows, num_columns] where it lies."""
    other = _other(x, cells, value, num_rows, num_columns)
    return value.to(x.dtype.element_ty).to(tl.float32) + other


@triton.jit
def store(c, cells, value, num_rows, num_columns):
    """`value` -> C[num_rows, num_columns] where it lies, as far as C reaches."""
    fragments.store_block(c, cells.row, cells.column, value, num_rows, num_columns, num_columns)
