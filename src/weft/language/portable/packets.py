"""What a packet looks like: flag in the upper half of an 8-byte word, data in the lower."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(src, flag, mask):
    """Values of 32 bits, or what pointers to them lead to, as packets."""
    if src.dtype.is_ptr():
        src = tl.load(src, mask=mask)
    data = src.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (flag.to(tl.int64) << 32) | data


@triton.jit
def unpack(packets, mask, dtype: tl.constexpr):
    """The data of packets; 0 where the mask does not hold."""
    data = packets.to(tl.int32)
    if mask is not None:
        data = tl.where(mask, data, 0)
    return data.to(dtype, bitcast=True)


@triton.jit
def is_late(packets, flag, mask):
    """Which packets do not carry the flag yet."""
    late = (packets >> 32).to(tl.int32) != flag
    if mask is not None:
        late = late & mask
    return late
