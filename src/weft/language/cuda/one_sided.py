"""NVIDIA: one-sided transfers, to near peers as everywhere, to far ones through NVSHMEM; and what
orders them."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import one_sided as declared
from weft.language import triton_api as api
from weft.language.addressing import is_near
from weft.language.cuda import nvshmem
from weft.language.cuda.nvshmem import has_far_peers
from weft.language.portable import one_sided as near
from weft.language.registry import implement
from weft.language.signals import complete_stores


@implement(declared.put, "cuda")
@triton.jit
def put(world, dst, src, to, mask):
    if has_far_peers(world):
        if is_near(world, to):
            near.put(world, dst, src, to, mask)
        else:
            nvshmem.put_far(world, dst, src, to, mask)
    else:
        near.put(world, dst, src, to, mask)


@implement(declared.get, "cuda")
@triton.jit
def get(world, dst, src, source, mask):
    if has_far_peers(world):
        if is_near(world, source):
            near.get(world, dst, src, source, mask)
        else:
            nvshmem.get_far(world, dst, src, source, mask)
    else:
        near.get(world, dst, src, source, mask)


@implement(declared.fence, "cuda")
@triton.jit
def fence(world):
    complete_stores()
    if has_far_peers(world):
        nvshmem.complete_far()
    # First the barrier: the fence of the thread that signals later then covers all threads.
    tl.debug_barrier()
    api.assembly("fence.acq_rel.sys; mov.u32 $0, 0;", "=r,~{memory}")
