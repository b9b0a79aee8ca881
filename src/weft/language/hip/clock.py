"""AMD: the clock that all compute units share."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import clock as declared
from weft.language import triton_api as api
from weft.language.registry import implement

NS_PER_TICK = tl.constexpr(10)  # s_memrealtime counts at 100 MHz on CDNA 3 and 4


@implement(declared.clock_ns, "hip")
@triton.jit
def clock_ns():
    """Waves may read different times."""
    ticks = api.assembly("s_memrealtime $0\n s_waitcnt lgkmcnt(0)", "=s", dtype=tl.int64)
    return ticks * NS_PER_TICK
