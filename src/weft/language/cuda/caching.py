"""NVIDIA: prefetches into L2."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import caching as declared
from weft.language.cuda.target import has_bulk_stores
from weft.language.registry import implement

LINE_BYTES = tl.constexpr(128)


@implement(declared.prefetch, "cuda")
@triton.jit
def prefetch(src, num_bytes: tl.constexpr, mask):
    if mask is None:
        wanted = tl.full(src.shape, 1, tl.int32)
    else:
        wanted = mask.to(tl.int32)
    if has_bulk_stores():
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0;"
            f" @p cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; }}"
            " mov.u32 $0, 0;",
            "=r,l,r",
            [src, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        first = src.to(tl.pointer_type(tl.int8), bitcast=True)
        for offset in tl.static_range(0, num_bytes, LINE_BYTES):
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; }"
                " mov.u32 $0, 0;",
                "=r,l,r",
                [first + offset, wanted],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
