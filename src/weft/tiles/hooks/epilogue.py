"""What is done to a product's tile on its way to memory: element by element, in registers.

    silu, ..      an activation
    silu_mul, ..  columns in pairs, gate and value: [m, 2 n] -> [m, n]
    mul, add      with the same elements of a matrix; mul_row, add_row: of one row for all rows
    store         a tile of any width -> rows of a matrix

Each rounds to the result's dtype first what it is given, as if that had been stored: so what is
fused is what is not. `load` makes a value of the fragment that `emit` is given; behind a gate
it lies in half as many columns (`halved`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import activations, fragments

# Elements of a chunk that a thread has side by side: what a gate leaves of them is 16 bytes.
_PAIRS = tl.constexpr(2 * fragments.VECTOR.value)


@triton.jit
def load(fragment):
    """A fragment's value in fp32; a thread has pairs of columns."""
    return fragments.in_registers(fragment, _PAIRS).to(tl.float32)


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    return value.to(dtype).to(tl.float32)


@triton.jit
def silu(value, dtype: tl.constexpr):
    """Of values rounded to dtype, in fp32, as those below."""
    return activations.silu(_rounded(value, dtype))


@triton.jit
def gelu(value, dtype: tl.constexpr):
    return activations.gelu(_rounded(value, dtype))


@triton.jit
def gelu_tanh(value, dtype: tl.constexpr):
    return activations.gelu_tanh(_rounded(value, dtype))


@triton.jit
def _gate(value, dtype: tl.constexpr, activation: tl.constexpr):
    """activation(value[:, 0::2]) * value[:, 1::2]"""
    rounded = _rounded(value, dtype)
    gate, up = rounded.reshape(value.shape[0], value.shape[1] // 2, 2).split()
    return fragments.in_rows(activation(gate) * up)


@triton.jit
def silu_mul(value, dtype: tl.constexpr):
    return _gate(value, dtype, activations.silu)


@triton.jit
def gelu_mul(value, dtype: tl.constexpr):
    return _gate(value, dtype, activations.gelu)


@triton.jit
def gelu_tanh_mul(value, dtype: tl.constexpr):
    return _gate(value, dtype, activations.gelu_tanh)


@triton.jit
def half(columns):
    """How many columns a gate leaves."""
    return columns // 2


@triton.jit
def halved(cells):
    """Where a fragment lies whose columns a gate has halved."""
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
def _row(x, cells, value, num_columns):
    """The elements of a row x[num_columns] for the columns of `value`, in fp32."""
    j = cells.column + fragments.index(value, 1)
    return tl.load(x + j, mask=j < num_columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def mul(x, cells, value, num_rows, num_columns):
    """value, rounded, * x[num_rows, num_columns] where it lies."""
    return _rounded(value, x.dtype.element_ty) * _other(x, cells, value, num_rows, num_columns)


@triton.jit
def add(x, cells, value, num_rows, num_columns):
    """value, rounded, + x[num_rows, num_columns] where it lies."""
    return _rounded(value, x.dtype.element_ty) + _other(x, cells, value, num_rows, num_columns)


@triton.jit
def mul_row(x, cells, value, num_rows, num_columns):
    """value, rounded, * x[num_columns] of its columns."""
    return _rounded(value, x.dtype.element_ty) * _row(x, cells, value, num_columns)


@triton.jit
def add_row(x, cells, value, num_rows, num_columns):
    """value, rounded, + x[num_columns] of its columns."""
    return _rounded(value, x.dtype.element_ty) + _row(x, cells, value, num_columns)


@triton.jit
def store(c, cells, value, num_rows, num_columns):
    """`value` -> C[num_rows, num_columns] where it lies, as far as C reaches."""
    fragments.store_block(c, cells.row, cells.column, value, num_rows, num_columns, num_columns)
