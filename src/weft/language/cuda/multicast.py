"""NVIDIA: multicast instructions, from sm_90 on. Compiled by the tests, run by nobody."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import multicast as declared
from weft.language.cuda.target import require_multicast
from weft.language.registry import gap, implement

for _declared in (declared.multimem_ld_reduce, declared.multimem_st, declared.multimem_red):
    gap(_declared, "hip", "xGMI has no multicast")
    gap(_declared, "emu", "no operator uses multicast, so nothing is there to be checked")


@implement(declared.multimem_ld_reduce, "cuda")
@triton.jit
def multimem_ld_reduce(ptr):
    require_multicast()
    if ptr.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.f32 $0, [$1];",
            "=f,l,~{memory}",
            [ptr],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.s32 $0, [$1];",
            "=r,l,~{memory}",
            [ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@implement(declared.multimem_st, "cuda")
@triton.jit
def multimem_st(ptr, value):
    require_multicast()
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r,~{memory}",
        [ptr, value.to(tl.int32, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@implement(declared.multimem_red, "cuda")
@triton.jit
def multimem_red(ptr, value):
    require_multicast()
    if ptr.dtype.element_ty == tl.float32:
        tl.inline_asm_elementwise(
            "multimem.red.relaxed.sys.global.add.f32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r,~{memory}",
            [ptr, value.to(tl.int32, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "multimem.red.relaxed.sys.global.add.s32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r,~{memory}",
            [ptr, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
