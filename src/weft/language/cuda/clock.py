"""NVIDIA: the clock that all SMs of a GPU share."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import clock as declared
from weft.language.registry import implement


@implement(declared.clock_ns, "cuda")
@triton.jit
def clock_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
    )
