"""NVIDIA: lines of 128 bytes. Every tile load and store of this file is one of lines.

`weft.verify.compiled` knows them by that, and finds one that Triton laid out otherwise: eight
neighbouring threads of a warp hold a line, 16 bytes each, and move it by one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import lines as declared
from weft.language.addressing import at
from weft.language.cuda.packets import wait_tile
from weft.language.portable.lines import from_lines, is_counted, is_flag, line_pointers, to_lines
from weft.language.registry import implement


@triton.jit
def converge():
    """The threads of each warp go on together: one instruction then moves whole lines."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@implement(declared.put_lines, "cuda")
@triton.jit
def put_lines(world, dst, src, flag, to, count):
    LINES: tl.constexpr = src.shape[0]
    words = to_lines(src, flag, count)
    pointers = line_pointers(at(world, dst, to), LINES)
    converge()
    # Written through: STG.STRONG.SYS, as a volatile store would be.
    if count is None:
        tl.store(pointers, words, cache_modifier=".wt")
    else:
        tl.store(pointers, words, mask=is_counted(count, LINES), cache_modifier=".wt")


@triton.jit
def read(pointers, mask):
    converge()
    if mask is None:
        return tl.load(pointers, volatile=True)
    else:
        return tl.load(pointers, mask=mask, other=0, volatile=True)


@triton.jit
def is_late(words, flag, mask):
    """Which words are flags that have not come."""
    late = is_flag() & (words != flag)
    if mask is not None:
        late = late & mask
    return late


@triton.jit
def flag_of(words):
    return words


@implement(declared.wait_lines, "cuda")
@triton.jit
def wait_lines(lines, flag, num_lines, world, count, dtype, site):
    pointers = line_pointers(lines, num_lines)
    mask = None if count is None else is_counted(count, num_lines)
    # Data and flags of the result come from one look: no line is late in it.
    words = wait_tile(pointers, flag, world, mask, site, read, is_late, flag_of)
    # All threads have read before any goes on: what it sends next says so.
    tl.debug_barrier()
    return from_lines(words, dtype)
