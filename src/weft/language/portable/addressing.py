"""The world's table, and address translation on GPUs: plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import addressing as declared
from weft.language import world_layout as layout
from weft.language.registry import implement


@implement(declared.rank, "cuda", "hip", "emu")
@triton.jit
def rank(world):
    return tl.load(world.table + layout.RANK).to(tl.int32)


@implement(declared.node, "cuda", "hip", "emu")
@triton.jit
def node(world):
    return tl.load(world.table + layout.NODE).to(tl.int32)


@implement(declared.is_near, "cuda", "hip", "emu")
@triton.jit
def is_near(world, peer):
    return tl.load(world.table + layout.PEER_BASES + peer) != 0


@implement(declared.at, "cuda", "hip")
@triton.jit
def at(world, ptr, peer):
    delta = tl.load(world.table + layout.PEER_BASES + peer) - tl.load(
        world.table + layout.HEAP_BASE
    )
    item_bytes: tl.constexpr = (ptr.dtype.element_ty.primitive_bitwidth + 7) // 8
    # Heaps start on page boundaries. Said right here: a hint on what another function returns
    # is lost by the inliner, and any other form of this addition falls to 2-byte stores.
    if item_bytes == 1:
        # A division by 1 is folded, and a hint on it with it: bytes would be stored one at a time.
        return ptr + tl.multiple_of(delta, 16)
    return ptr + tl.multiple_of(delta // item_bytes, 16)


@implement(declared.translate, "cuda", "hip")
@triton.jit
def translate(world, ptr, peer):
    return at(world, ptr, peer)
