"""Emulator: packets. What they mean is in weft.emulator.packets."""

from __future__ import annotations

import triton

from weft.language import packets as declared
from weft.language.addressing import translate
from weft.language.emu.extern import elements_of
from weft.language.portable.packets import pack, unpack
from weft.language.registry import implement


@implement(declared.put_packets, "emu")
@triton.jit
def put_packets(world, dst, src, flag, to, mask):
    words = translate(world, dst, to)
    packets = pack(dst, src, flag, mask)
    if mask is None:
        elements_of("weft.put_packets", words, packets)
    else:
        elements_of("weft.put_packets", words, packets, mask)


@implement(declared.wait_packets, "emu")
@triton.jit
def wait_packets(packets, flag, world, mask, dtype, site):
    if mask is None:
        return unpack(elements_of("weft.wait_packets", packets, flag), mask, dtype)
    else:
        return unpack(elements_of("weft.wait_packets", packets, flag, mask), mask, dtype)
