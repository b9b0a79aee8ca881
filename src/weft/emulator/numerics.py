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


def mulhisi(a, b):
    """The upper half of the product of two signed integers."""
    high = mulhiui(a, b)
    zero = a.dtype.type(0)
    return high - np.where(a < 0, b, zero)[()] - np.where(b < 0, a, zero)[()]


def clz(a):
    """Leading zeros."""
    bits = a.dtype.itemsize * 8
    unsigned = a.view(UNSIGNED[a.dtype]).astype(u64)
    count = np.zeros(np.shape(a), a.dtype)
    for step in range(bits):
        count = count + ((unsigned >> np.uint64(step)) == 0).astype(a.dtype)
    return count[()]


def ffs(a):
    """The position of the lowest set bit, from 1; 0 where there is none."""
    lowest = a & -a
    return np.where(a == 0, 0, a.dtype.itemsize * 8 - clz(lowest))[()]


def popcount(a):
    return np.bitwise_count(a.view(UNSIGNED[a.dtype])).astype(a.dtype)


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


def erf(a):
    return a.dtype.type(math.erf(float(a))) if _scalar(a) else special("erf", a)


def special(name: str, a):
    """One of torch's special functions, computed in f64."""
    import torch

    exact = getattr(torch.special, name)(torch.from_numpy(np.array(a, f64))).numpy()
    return exact.astype(a.dtype)[()]


def rsqrt(a):
    return a.dtype.type(1) / np.sqrt(a)


def round_away(a):
    """To the nearest whole number, halves away from zero."""
    whole = np.trunc(a)
    half = a.dtype.type(0.5)
    return whole + np.copysign((np.abs(a - whole) >= half).astype(a.dtype), a)


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


# fp4 by its bits: sign, two of exponent, one of fraction.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])


def from_fp4(a, axis: int):
    """Pairs of fp4 (e2m1) along `axis`, the low half of a byte first, as f32."""
    bits = a.view(u8)
    pairs = np.stack([FP4[bits & 15], FP4[bits >> 4]], axis=axis + 1)
    shape = list(a.shape)
    shape[axis] *= 2
    return pairs.reshape(shape)


def scaled(a, scale, axis: int):
    """A micro-scaled operand as f32: each group of 16 or 32 along the contracted axis has a scale.

    Scales of 8-bit integers are exponents (255 is NaN), others factors.
    """
    wide = a.astype(f32)
    if scale is None:
        return wide
    if scale.dtype.kind == "i":
        exponent = scale.view(u8).astype(i32)
        factor = np.ldexp(np.float32(1), exponent - 127).astype(f32)
        factor = np.where(exponent == 255, np.float32(np.nan), factor)
    else:
        factor = scale.astype(f32)
    factor = np.repeat(factor, wide.shape[axis] // factor.shape[1], axis=1)
    return wide * (factor if axis == 1 else factor.T)


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


def map_elementwise(function: Callable, pack: int, *tiles):
    """Apply a scalar function, given `pack` consecutive elements at a time, to every element."""
    tiles = np.broadcast_arrays(*tiles)
    flat = [np.ravel(tile) for tile in tiles]
    found = []
    for start in range(0, flat[0].size, pack):
        values = function(*(tile[start + i] for tile in flat for i in range(pack)))
        values = values if isinstance(values, tuple) else (values,)
        found += zip(*(values[i : i + pack] for i in range(0, len(values), pack)), strict=True)
    results = tuple(
        np.array(column, dtype=np.asarray(column[0]).dtype).reshape(tiles[0].shape)
        for column in zip(*found, strict=True)
    )
    return results if len(results) > 1 else results[0]


def by_element(function: Callable) -> Callable:
    """A scalar function with branches in it, as one on tiles."""
    return lambda *tiles: map_elementwise(function, 1, *tiles)


def each_element(access: Callable, dtype: np.dtype, shape: tuple, mask, *operands):
    """`access` once per element whose mask is on; the others are 0."""
    found = np.zeros(shape, dtype)
    mask, *tiles = np.broadcast_arrays(True if mask is None else mask, *operands, found)[:-1]
    for at in np.ndindex(shape):
        if mask[at]:
            found[at] = access(*(tile[at] for tile in tiles))
    return found[()]


def poll(read: Callable, expected, limit=None):
    """Read until it gives `expected`; whoever reads may be set aside meanwhile.

    With a time limit it gives up once nobody else can go on: reads are repeated only when the
    word has changed or when all are stuck.
    """
    last, same = None, 0
    while True:
        seen = read()
        if seen == expected:
            return np.bool_(True)
        same = same + 1 if seen == last else 0
        last = seen
        if limit is not None and int(limit) and same > 2:
            return np.bool_(False)


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
