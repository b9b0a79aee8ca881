"""put and get between near ranks, by loads and stores of the calling program; and what is the same
wherever they lead."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import one_sided as declared
from weft.language.addressing import translate
from weft.language.registry import implement
from weft.language.signals import notify


@implement(declared.put, "hip", "emu")
@triton.jit
def put(world, dst, src, to, mask):
    if src.dtype.is_ptr():
        tl.store(translate(world, dst, to), tl.load(src, mask=mask), mask=mask)
    else:
        tl.store(translate(world, dst, to), src, mask=mask)


@implement(declared.get, "hip", "emu")
@triton.jit
def get(world, dst, src, source, mask):
    tl.store(dst, tl.load(translate(world, src, source), mask=mask), mask=mask)


@implement(declared.put_signal, "cuda", "hip", "emu")
@triton.jit
def put_signal(world, dst, src, signal, value, to, op, mask, scope):
    declared.put(world, dst, src, to=to, mask=mask)
    notify(world, signal, value, to=to, op=op, scope=scope)
