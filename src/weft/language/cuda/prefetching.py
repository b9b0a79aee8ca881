"""NVIDIA: L2 is asked for memory."""

from __future__ import annotations

import triton

from weft.language import prefetching as declared
from weft.language import triton_api as api
from weft.language.cuda.signals import has_bulk_stores
from weft.language.registry import implement


@implement(declared.prefetch, "cuda")
@triton.jit
def prefetch(ptr, num_bytes):
    if has_bulk_stores():
        api.assembly(
            "{ .reg .b64 a; and.b64 a, $1, -16; cp.async.bulk.prefetch.L2.global [a], "
            f"{num_bytes}; }} mov.u32 $0, 0;",
            "=r,l",
            ptr,
        )
    else:
        api.assembly("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", ptr)
