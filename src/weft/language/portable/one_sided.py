"""put and get between near ranks: loads and stores of the calling program; what warps lack."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import one_sided as declared
from weft.language.addressing import translate
from weft.language.registry import BACKENDS, gap, implement
from weft.language.signals import notify


@implement(declared.put, "cuda", "hip", "emu")
@triton.jit
def put(world, dst, src, to, mask):
    if src.dtype.is_ptr():
        tl.store(translate(world, dst, to), tl.load(src, mask=mask), mask=mask)
    else:
        tl.store(translate(world, dst, to), src, mask=mask)


@implement(declared.get, "cuda", "hip", "emu")
@triton.jit
def get(world, dst, src, source, mask):
    tl.store(dst, tl.load(translate(world, src, source), mask=mask), mask=mask)


@implement(declared.put_signal, "cuda", "hip", "emu")
@triton.jit
def put_signal(world, dst, src, signal, value, to, op, mask, scope):
    put(world, dst, src, to, mask)
    notify(world, signal, value, to=to, op=op, scope=scope)


@implement(declared.put_nbi, "cuda", "hip")
@triton.jit
def put_nbi(world, dst, src, to, mask):
    put(world, dst, src, to, mask)


@implement(declared.get_nbi, "cuda", "hip")
@triton.jit
def get_nbi(world, dst, src, source, mask):
    get(world, dst, src, source, mask)


# A value in Triton belongs to the whole program: nothing in the language can differ from warp to
# warp, or be done by one of them.
for _backend in BACKENDS:
    gap(
        declared.put_warp,
        _backend,
        "a Triton program has no name for one of its warps; launch with num_warps=1, then the "
        "program is one warp and put is a put by a warp",
    )
    gap(
        declared.warp,
        _backend,
        "every scalar of a Triton program is the same for all its warps; launch with num_warps=1 "
        "and use tl.program_id",
    )
