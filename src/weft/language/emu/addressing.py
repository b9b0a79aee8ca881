"""Emulator: addresses of peers, checked."""

from __future__ import annotations

import triton

from weft.language import addressing as declared
from weft.language.emu.extern import same_as_first
from weft.language.registry import implement


@implement(declared.at, "emu")
@triton.jit
def at(world, ptr, peer):
    return same_as_first("weft.at", ptr, world.table, peer)


@implement(declared.translate, "emu")
@triton.jit
def translate(world, ptr, peer):
    return same_as_first("weft.translate", ptr, world.table, peer)
