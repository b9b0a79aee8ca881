"""Values of 8, 16 or 32 bits as words of 32, and back: neighbours share a word."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import triton_api as api

_UNSIGNED = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32}


@api.builtin
def unsigned(bits, _semantic=None):
    """The unsigned integer type of so many bits."""
    return api.constexpr(_UNSIGNED[api.unwrap(bits)])


@api.builtin
def in_pairs(values, _semantic=None):
    """[..., n] as [..., n / 2, 2]."""
    *outer, last = (api.unwrap(extent) for extent in values.shape)
    return api.reshape(_semantic, values, [*outer, last // 2, 2])


@api.builtin
def in_a_row(values, _semantic=None):
    """[..., n, 2] as [..., 2 n]."""
    *outer, last, pair = (api.unwrap(extent) for extent in values.shape)
    return api.reshape(_semantic, values, [*outer, last * pair])


@triton.jit
def joined(values):
    """Two neighbours as one integer of twice the bits, the first in the lower half."""
    bits: tl.constexpr = values.dtype.primitive_bitwidth
    wide: tl.constexpr = unsigned(2 * bits)
    low, high = tl.split(in_pairs(values))
    return low.to(wide) | (high.to(wide) << bits)


@triton.jit
def parted(words):
    """The inverse of joined."""
    bits: tl.constexpr = words.dtype.primitive_bitwidth // 2
    narrow: tl.constexpr = unsigned(bits)
    return in_a_row(tl.join(words.to(narrow), (words >> bits).to(narrow)))


@triton.jit
def to_words(values):
    """[..., n] values as [..., n * their bits / 32] words; a scalar as one."""
    bits: tl.constexpr = values.dtype.primitive_bitwidth
    words = values.to(unsigned(bits), bitcast=True)
    if values.type.is_block():
        if bits == 8:
            words = joined(words)
        if bits <= 16:
            words = joined(words)
        return words
    else:
        return words.to(tl.uint32)


@triton.jit
def from_words(words, dtype: tl.constexpr):
    """Words as values of dtype: the inverse of to_words."""
    bits: tl.constexpr = dtype.primitive_bitwidth
    if words.type.is_block():
        if bits <= 16:
            words = parted(words)
        if bits == 8:
            words = parted(words)
        return words.to(dtype, bitcast=True)
    else:
        return words.to(unsigned(bits)).to(dtype, bitcast=True)


@triton.jit
def repeated(word, BITS: tl.constexpr):
    """A scalar's lowest BITS bits in every place of a 32-bit word."""
    if BITS == 8:
        word = word | (word << 8)
    if BITS <= 16:
        word = word | (word << 16)
    return word


@triton.jit
def widened(mask, BITS: tl.constexpr):
    """A mask of 32-bit words as one of the values of BITS bits in them."""
    flags = mask.to(tl.int8)
    if BITS <= 16:
        flags = in_a_row(tl.join(flags, flags))
    if BITS == 8:
        flags = in_a_row(tl.join(flags, flags))
    return flags != 0
