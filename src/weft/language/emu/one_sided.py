"""Emulator: transfers that are under way; what they mean is in weft.emulator.packets."""

from __future__ import annotations

import triton

from weft.language import one_sided as declared
from weft.language.addressing import translate
from weft.language.emu.extern import token
from weft.language.one_sided import get, num_warps, put
from weft.language.registry import implement


@implement(declared.put_nbi, "emu")
@triton.jit
def put_nbi(world, dst, src, to, mask):
    token("weft.begin_transfer")
    put(world, dst, src, to=to, mask=mask)
    token("weft.end_transfer")


@implement(declared.get_nbi, "emu")
@triton.jit
def get_nbi(world, dst, src, source, mask):
    token("weft.begin_transfer")
    get(world, dst, src, source=source, mask=mask)
    token("weft.end_transfer")


@implement(declared.fence, "emu")
@triton.jit
def fence(world):
    token("weft.fence")


@implement(declared.quiet, "emu")
@triton.jit
def quiet(world):
    token("weft.quiet")


@implement(declared.notify_warp, "emu")
@triton.jit
def notify_warp(world, signal, value, to, scope):
    word = translate(world, signal, to)
    token(f"weft.notify_warp:add.release.{scope}", word, value, num_warps())
