"""Declarations: who am I, who is near, and where a symmetric object lies on another rank."""

from __future__ import annotations

import triton.language as tl

from weft.language.operands import Number
from weft.language.registry import declare
from weft.language.world_arg import WorldArg


@declare()
def rank(world: WorldArg) -> tl.tensor:
    """This rank's number within `world`.

        rank(world)  =  0 .. num_ranks(world) - 1

    Cost    one cached load of the world's table
    Source  OpenSHMEM shmem_my_pe
    """


@declare(evaluate=lambda arguments, _: arguments["world"].num_ranks)
def num_ranks(world: WorldArg) -> int:
    """How many ranks `world` has: a compile-time constant.

    Cost    nothing
    Source  OpenSHMEM shmem_n_pes
    """


@declare()
def node(world: WorldArg) -> tl.tensor:
    """The number of this rank's node.

    Cost    one cached load of the world's table
    """


@declare()
def is_near(world: WorldArg, peer: Number) -> tl.tensor:
    """Can this rank load and store memory of rank `peer` directly?

        is_near(world, rank(world))  =  True

    Sync    none; the answer never changes within a world
    Raises  PeerError: a constant peer outside 0 .. num_ranks - 1
    Cost    one cached load of the world's table
    Source  OpenSHMEM shmem_ptr(...) != NULL
    """


@declare()
def at(world: WorldArg, ptr: tl.tensor, peer: Number) -> tl.tensor:
    """The address, on near rank `peer`, of the symmetric object that `ptr` points to here.

        at(world, ptr, peer)  =  ptr + (heap base of peer - own heap base)

    Shapes  ptr: a scalar pointer or a tile of pointers; the result has the same shape
    Sync    none: data behind the address is ordered by notify and wait
    Raises  PeerError: peer outside 0 .. num_ranks - 1 (when traced; at run time on the emulator)
            NotSymmetricError: ptr is not on the heap (emulator)
            FarPointerError: peer is in another scale-up domain (emulator); use put or get
    Cost    two cached loads and an addition; alignment and contiguity are kept, so contiguous
            tiles are still moved 128 bits at a time
    Source  OpenSHMEM shmem_ptr; Iris translate; dl.symm_at
    """


@declare(public=False)
def translate(world: WorldArg, ptr: tl.tensor, peer: Number) -> tl.tensor:
    """As `at`, but the peer may be far: the address only serves put, get and notify."""
