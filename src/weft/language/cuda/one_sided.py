"""NVIDIA: what orders and completes one-sided transfers."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import one_sided as declared
from weft.language.registry import implement
from weft.language.signals import complete_stores


@implement(declared.fence, "cuda")
@triton.jit
def fence(world):
    complete_stores()
    # First the barrier: the fence of the thread that signals later then covers all threads.
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@implement(declared.quiet, "cuda")
@triton.jit
def quiet(world):
    complete_stores()
    tl.inline_asm_elementwise(
        "fence.sc.sys; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    fence(world)
    tl.debug_barrier()
