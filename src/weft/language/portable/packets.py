"""What a packet looks like: flag in the upper half of an 8-byte word, data in the lower.

Data are values of 8, 16 or 32 bits, of which neighbours share a word.
"""

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


@triton.jit
def pack(dst, src, flag, mask):
    """Values, or what pointers to them lead to, as packets for dst: 32 bits in each."""
    if src.dtype.is_ptr():
        bits: tl.constexpr = src.dtype.element_ty.primitive_bitwidth
        if mask is None:
            src = tl.load(src)
        elif src.type.is_block() and bits < 32:
            src = tl.load(src, mask=widened(mask, bits))
        else:
            src = tl.load(src, mask=mask)
    data = to_words(src)
    if dst.type.is_block() and not src.type.is_block():
        data = repeated(data, src.dtype.primitive_bitwidth)
    return (flag.to(tl.int64) << 32) | data.to(tl.int64)


@triton.jit
def unpack(packets, mask, dtype: tl.constexpr):
    """The data of packets; 0 where the mask does not hold."""
    data = packets.to(tl.uint32)
    if mask is not None:
        data = tl.where(mask, data, 0)
    return from_words(data, dtype)


@triton.jit
def is_late(packets, flag, mask):
    """Which packets do not carry the flag yet."""
    late = flag_of(packets) != flag
    if mask is not None:
        late = late & mask
    return late


@triton.jit
def flag_of(packets):
    return (packets >> 32).to(tl.int32)


@triton.jit
def wait_for_all(wait_tile: tl.constexpr, packets, flag, world, mask, dtype: tl.constexpr, site):
    """The data of packets once the target's `wait_tile` has seen the flag in each of them."""
    if packets.type.is_block():
        return unpack(wait_tile(packets, flag, world, mask, site), mask, dtype)
    else:
        tile = packets + tl.zeros((1,), tl.int32)
        chosen = mask if mask is None else (mask & tl.full((1,), 1, tl.int1))
        seen = tl.max(wait_tile(tile, flag, world, chosen, site))
        return unpack(seen, mask, dtype)
