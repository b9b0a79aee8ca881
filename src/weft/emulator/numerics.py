"""What TTIR's arithmetic means, in numpy: exact where integers are, rounded where floats are.

Every function takes numpy scalars or arrays that broadcast, and keeps their dtype. A scalar goes
in and a scalar comes out: an address computation is a handful of scalars, so they matter most.
Generated kernels call these by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from weft.base.errors import OutOfBoundsError
from weft.base.place import Place

# ---------------------------------------------------------------------------------------------
# Elements

i1 = np.dtype(np.bool_)
i8, i16, i32, i64 = (np.dtype(f"int{bits}") for bits in (8, 16, 32, 64))
u8, u16, u32, u64 = (np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
f16, f32, f64 = (np.dtype(f"float{bits}") for bits in (16, 32, 64))
bf16 = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype] = {
    "i1": i1,
    "i8": i8,
    "i16": i16,
    "i32": i32,
    "i64": i64,
    "index": i64,
    "ptr": i64,
    "f16": f16,
    "bf16": bf16,
    "f32": f32,
    "f64": f64,
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "f8E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}

UNSIGNED = {i1: i1, i8: u8, i16: u16, i32: u32, i64: u64}
# The largest finite value: conversions to fp8 saturate, as cvt.satfinite does.
LARGEST = {
    dtype: float(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items() if "f8" in name
}


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype in LARGEST or dtype == bf16


def _scalar(value: Any) -> bool:
    return isinstance(value, np.generic)


# ---------------------------------------------------------------------------------------------
# Integers


def divsi(a, b):
    """Signed division, truncated toward zero; numpy's floors."""
    if _scalar(a) and _scalar(b):
        if a >= 0 and b > 0:
            return a // b
        if b == 0:
            return a.dtype.type(0)
        quotient = abs(int(a)) // abs(int(b))
        return _wrapped(-quotient if (a < 0) != (b < 0) else quotient, a.dtype)
    quotient = a // b
    inexact = quotient * b != a
    return (quotient + (inexact & ((a < 0) != (b < 0)))).astype(quotient.dtype, copy=False)


def remsi(a, b):
    """Signed remainder with the dividend's sign."""
    if _scalar(a) and _scalar(b) and a >= 0 and b > 0:
        return a % b
    return np.fmod(a, b)


def _wrapped(value: int, dtype: np.dtype):
    """A Python integer as a two's complement scalar."""
    bits = dtype.itemsize * 8
    value &= (1 << bits) - 1
    return dtype.type(value - (1 << bits) if value >> (bits - 1) else value)


def mulhiui(a, b):
    """The upper half of the product of two unsigned integers."""
    dtype = a.dtype
    bits = dtype.itemsize * 8
    a, b = a.view(UNSIGNED[dtype]), b.view(UNSIGNED[dtype])
    if bits < 64:
        return ((a.astype(u64) * b.astype(u64)) >> np.uint64(bits)).astype(dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & low, b >> half, b & low
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & low)
    return (a_high * b_high + (middle >> half) + (other >> half)).view(dtype)


# ---------------------------------------------------------------------------------------------
# Conversions


def float_to_int(a, dtype: np.dtype, unsigned: bool = False):
    """Toward zero; out of range saturates and NaN is 0, as the GPU's conversion does."""
    wide = a.astype(f64)
    width = max(dtype.itemsize, 4) * 8
    low, high = (0, 1 << width) if unsigned else (-(1 << (width - 1)), 1 << (width - 1))
    inside = (wide > low - 1) & (wide < high)
    kind = np.dtype(f"{'u' if unsigned else ''}int{width}")
    if np.all(inside):
        whole = wide.astype(kind)
    else:
        largest = kind.type(high - 1)
        outside = np.where(wide >= high, largest, kind.type(low))
        outside = np.where(np.isnan(wide), kind.type(0), outside)
        whole = np.where(inside, np.where(inside, wide, 0).astype(kind), outside)[()]
    return whole.astype(UNSIGNED[dtype] if unsigned else dtype).view(dtype)


def to_fp8(a, dtype: np.dtype):
    """Round to nearest, saturating; NaN stays."""
    largest = LARGEST[dtype]
    wide = a.astype(f32)
    return np.clip(wide, np.float32(-largest), np.float32(largest)).astype(dtype)


def round_to_zero(a, dtype: np.dtype):
    """Narrow a float toward zero (rounding = rtz)."""
    if dtype == bf16:
        bits = a.astype(f32).view(u32) & np.uint32(0xFFFF0000)
        return bits.view(f32).astype(bf16)
    near = a.astype(dtype)
    over = np.abs(near.astype(a.dtype)) > np.abs(a)
    bits = near.view(UNSIGNED[np.dtype(f"int{dtype.itemsize * 8}")])
    return np.where(over, bits - 1, bits)[()].astype(bits.dtype).view(dtype)


# ---------------------------------------------------------------------------------------------
# Floats


def fma(a, b, c):
    """a * b + c rounded once: the product of two f32 is exact in f64."""
    if a.dtype == f64:
        return a * b + c
    return (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(a.dtype)


# The values of e2m1, by its four bits.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f64)
FP4 = np.concatenate([FP4, -FP4])


def from_fp4(a, axis: int):
    """Bytes as two e2m1 each, the lower bits first, one behind the other along the axis."""
    bits = a.view(np.uint8)
    shape = (*a.shape[:axis], 2 * a.shape[axis], *a.shape[axis + 1 :])
    return FP4[np.stack([bits & 15, bits >> 4], axis + 1)].reshape(shape)


def paired(low, high):
    """Two f32 as the 64 bits of one register, as f32x2 has them."""
    return np.stack(np.broadcast_arrays(low, high), -1).astype(f32).view(i64)[..., 0]


def low_of(pairs):
    return np.ascontiguousarray(pairs)[..., None].view(f32)[..., 0]


def high_of(pairs):
    return np.ascontiguousarray(pairs)[..., None].view(f32)[..., 1]


def in_pairs(function, *pairs):
    """An operation on f32x2: the one on f32, of the lower and of the upper halves."""
    low, high = (function(*map(half, pairs)) for half in (low_of, high_of))
    return paired(low, high)


def erf(a):
    if _scalar(a):
        return a.dtype.type(math.erf(float(a)))
    import torch

    return torch.special.erf(torch.from_numpy(a.astype(f64))).numpy().astype(a.dtype)


def rsqrt(a):
    return a.dtype.type(1) / np.sqrt(a)


# ---------------------------------------------------------------------------------------------
# Tiles


def dot(a, b, c):
    """a @ b + c, whose dtype is the result's; a product is summed in f64, then rounded to f32."""
    dtype = c.dtype
    product = np.matmul(a.astype(f64), b.astype(f64))
    if dtype == f64:
        return product + c
    if dtype.kind == "i":  # exact up to 2^53
        return (product.astype(i64) + c).astype(dtype)
    return (product.astype(f32) + c.astype(f32)).astype(dtype)


def tf32(a):
    """f32 with 10 bits of fraction, halves away from zero, as cvt.rna.tf32 rounds; NaN stays."""
    bits = np.ascontiguousarray(a).view(u32)
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(finite, rounded, bits).view(f32)


def reduce_with(combine: Callable, axis: int, *tiles):
    """Reduce along `axis` with any associative function, neighbours first."""
    tiles = tuple(np.moveaxis(tile, axis, 0) for tile in tiles)
    half = len(tiles)
    while tiles[0].shape[0] > 1:
        result = combine(*(t[0::2] for t in tiles), *(t[1::2] for t in tiles))
        tiles = result if half > 1 else (result,)
    found = tuple(tile[0] for tile in tiles)
    return found if half > 1 else found[0]


def scan_with(combine: Callable, axis: int, reverse: bool, *tiles):
    """The running form of reduce_with: each element becomes the sum of those up to it."""
    tiles = tuple(np.moveaxis(tile, axis, 0) for tile in tiles)
    if reverse:
        tiles = tuple(tile[::-1] for tile in tiles)
    count, extent, step = len(tiles), tiles[0].shape[0], 1
    while step < extent:
        joined = combine(*(t[:-step] for t in tiles), *(t[step:] for t in tiles))
        joined = joined if count > 1 else (joined,)
        tiles = tuple(np.concatenate([t[:step], j]) for t, j in zip(tiles, joined, strict=True))
        step *= 2
    if reverse:
        tiles = tuple(tile[::-1] for tile in tiles)
    found = tuple(np.moveaxis(tile, 0, axis) for tile in tiles)
    return found if count > 1 else found[0]


def accumulate(ufunc: np.ufunc, a, axis: int, reverse: bool, dtype: np.dtype):
    if reverse:
        return np.flip(ufunc.accumulate(np.flip(a, axis), axis=axis, dtype=dtype), axis)
    return ufunc.accumulate(a, axis=axis, dtype=dtype)


def gather(a, indices, axis: int, place: Place):
    """Elements picked along an axis."""
    indices = indices.astype(i64)
    extent = a.shape[axis]
    if indices.size and (indices.min() < 0 or indices.max() >= extent):
        bad = indices[(indices < 0) | (indices >= extent)][0]
        raise OutOfBoundsError(f"tl.gather picks element {bad} of an axis of {extent}", place=place)
    return np.take_along_axis(a, indices, axis)


def histogram(a, mask, bins: int):
    """How often each of 0 .. bins - 1 occurs; others are not counted."""
    values = a[np.broadcast_to(mask, a.shape)] if mask is not None else a
    values = values[(values >= 0) & (values < bins)]
    return np.bincount(values, minlength=bins).astype(i32)


def by_element(function: Callable) -> Callable:
    """A scalar function with branches in it, as one on tiles."""

    def on_tiles(*tiles):
        tiles = np.broadcast_arrays(*tiles)
        found = [function(*scalars) for scalars in zip(*map(np.ravel, tiles), strict=True)]
        columns = zip(*found, strict=True) if isinstance(found[0], tuple) else (found,)
        results = [
            np.array(column, np.asarray(column[0]).dtype).reshape(tiles[0].shape)
            for column in columns
        ]
        return tuple(results) if len(results) > 1 else results[0]

    return on_tiles


def each_element(access: Callable, dtype: np.dtype, shape: tuple, mask, *operands):
    """`access` once per element whose mask is on; the others are 0."""
    found = np.zeros(shape, dtype)
    mask, *tiles = np.broadcast_arrays(True if mask is None else mask, *operands, found)[:-1]
    for at in np.ndindex(shape):
        if mask[at]:
            found[at] = access(*(tile[at] for tile in tiles))
    return found[()]


def loop_range(lower, upper, step, dtype: np.dtype):
    """The counter of a loop, as scalars of `dtype`."""
    count = int(upper) - int(lower)
    if count <= 0:
        return ()
    if step <= 0:
        raise ValueError(f"a loop with step {step}: TTIR's loops count up")
    if count // int(step) <= 1 << 16:
        return np.arange(lower, upper, step, dtype)
    return (dtype.type(i) for i in range(int(lower), int(upper), int(step)))


def unsigned_loop_range(lower, upper, step, dtype: np.dtype):
    kind = UNSIGNED[dtype]
    lower, upper, step = (int(value.view(kind)) for value in (lower, upper, step))
    return (_wrapped(i, dtype) for i in range(lower, upper, step))
