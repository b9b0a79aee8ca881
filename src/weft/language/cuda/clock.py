"""NVIDIA: the clock that all SMs of a GPU share."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import clock as declared
from weft.language import triton_api as api
from weft.language.registry import implement


@implement(declared.clock_ns, "cuda")
@triton.jit
def clock_ns():
    return api.assembly("mov.u64 $0, %globaltimer;", "=l,~{memory}", dtype=tl.int64)
