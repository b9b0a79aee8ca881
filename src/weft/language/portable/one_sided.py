"""put and get between near ranks, by loads and stores of the calling program; and what is the same
wherever they lead."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import one_sided as declared
from weft.language.addressing import translate
from weft.language.one_sided import notify_warp
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


@implement(declared.put_nbi, "cuda", "hip")
@triton.jit
def put_nbi(world, dst, src, to, mask):
    declared.put(world, dst, src, to=to, mask=mask)


@implement(declared.get_nbi, "cuda", "hip")
@triton.jit
def get_nbi(world, dst, src, source, mask):
    declared.get(world, dst, src, source=source, mask=mask)


@implement(declared.put_signal_warp, "cuda", "hip", "emu")
@triton.jit
def put_signal_warp(world, dst, src, signal, value, to, mask, scope):
    declared.put(world, dst, src, to=to, mask=mask)
    notify_warp(world, signal, value, to=to, scope=scope)
