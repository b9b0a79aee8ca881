"""The time between two barriers."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import clock as declared
from weft.language.clock import clock_ns
from weft.language.registry import implement


@implement(declared.timestamp, "cuda", "hip", "emu")
@triton.jit
def timestamp():
    tl.debug_barrier()
    now = clock_ns()
    # Triton's pipeliner moves loads above an asm that stands alone, but not above a barrier.
    tl.debug_barrier()
    return now
