"""AMD: what orders and completes one-sided transfers."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import one_sided as declared
from weft.language import triton_api as api
from weft.language.addressing import translate
from weft.language.registry import implement
from weft.language.signals import complete_stores


@implement(declared.fence, "hip")
@triton.jit
def fence(world):
    complete_stores()
    tl.debug_barrier()
    # What a release to the system is made of on CDNA 3 and 4, without a word to write.
    api.assembly("buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n v_mov_b32 $0, 0", "=v,~{memory}")


@implement(declared.quiet, "hip")
@triton.jit
def quiet(world):
    fence(world)
    tl.debug_barrier()


@implement(declared.notify_warp, "hip")
@triton.jit
def notify_warp(world, signal, value, to, scope):
    # A release to the system, in every wave, and its first lane's atomic; scope is ignored, as
    # this is the widest.
    word = translate(world, signal, to)
    if word.dtype.element_ty.primitive_bitwidth == 32:
        api.assembly(
            "s_waitcnt vmcnt(0)\n buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n"
            " s_mov_b64 $0, exec\n s_mov_b64 exec, 1\n"
            " global_atomic_add $1, $2, off sc1\n s_mov_b64 exec, $0",
            "=&s,v,v,~{memory}",
            word,
            value,
            dtype=tl.int64,
        )
    else:
        api.assembly(
            "s_waitcnt vmcnt(0)\n buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n"
            " s_mov_b64 $0, exec\n s_mov_b64 exec, 1\n"
            " global_atomic_add_x2 $1, $2, off sc1\n s_mov_b64 exec, $0",
            "=&s,v,v,~{memory}",
            word,
            value,
            dtype=tl.int64,
        )
