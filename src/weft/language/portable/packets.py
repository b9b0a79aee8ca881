"""What a packet looks like: flag in the upper half of an 8-byte word, data in the lower."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language.portable.words import from_words, repeated, to_words, widened


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
