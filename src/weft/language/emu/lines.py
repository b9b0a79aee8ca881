"""Emulator: lines. What they mean is in weft.emulator.lines."""

from __future__ import annotations

import triton

from weft.language import lines as declared
from weft.language.addressing import at
from weft.language.emu.extern import elements_of
from weft.language.portable.lines import from_lines, line_pointers, to_lines
from weft.language.registry import implement


@implement(declared.put_lines, "emu")
@triton.jit
def put_lines(world, dst, src, flag, to, count):
    pointers = line_pointers(at(world, dst, to), src.shape[0])
    words = to_lines(src, flag, count)
    if count is None:
        elements_of("weft.put_lines", pointers, words, src.shape[0])
    else:
        elements_of("weft.put_lines", pointers, words, count)


@implement(declared.wait_lines, "emu")
@triton.jit
def wait_lines(lines, flag, num_lines, world, count, dtype, site):
    pointers = line_pointers(lines, num_lines)
    if count is None:
        words = elements_of("weft.wait_lines", pointers, flag, num_lines)
    else:
        words = elements_of("weft.wait_lines", pointers, flag, count)
    return from_lines(words, dtype)
