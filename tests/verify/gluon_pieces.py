"""What programs of wrong/ and right/ in Gluon share: two programs on each of two ranks, which share
one tile. Program 0 has a tile of its own before, which a peer needs; program 1 needs the peer's.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import weft.language as wl

TILE = gl.constexpr(128)
# Triton 3.9 has another name for it.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def lanes():
    return gl.arange(0, TILE, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def emit_own(world, box):
    """Program 0's own tile, to the peer."""
    gl.store(wl.at(world, box, 1 - wl.rank(world)) + lanes(), lanes().to(gl.float32))


@gluon.jit
def wait_for_part(world, summed):
    """Program 0, for the other one's part of the tile that they share."""
    wl.wait(summed, at_least=1, scope=wl.Scope.DEVICE, world=world)


@gluon.jit
def leave_part(stage, full, sums, summed):
    """Program 1's part, of what its other partition has loaded."""
    mbarrier.wait(full, 0)
    gl.store(sums + lanes(), stage.load(gl.BlockedLayout([1], [32], [4], [0])))
    wl.store(summed, 1, order=wl.Order.RELEASE, scope=wl.Scope.DEVICE)


@gluon.jit
def load_peers_tile(world, source, announced, stage, full):
    """A warp of program 1: by TMA, once the peer has announced it."""
    if gl.program_id(0) == 1:
        wl.wait(announced, at_least=1, world=world)
        mbarrier.expect(full, source.block_type.nbytes)
        load_tile(source, [0], full, stage)


@gluon.jit
def a_stage(source):
    """A tile in shared memory, and the barrier that says that it is there."""
    stage = gl.allocate_shared_memory(source.dtype, [TILE], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    return stage, full


def launch(world, kernel) -> torch.Tensor:
    """The sums that `kernel` leaves on this rank."""
    layout = gl.NVMMASharedLayout.get_default_for([TILE.value], gl.float32)
    box = world.zeros(TILE.value, torch.float32)
    source = TensorDescriptor.from_tensor(box, [TILE.value], layout)
    announced, summed = world.signals(1, torch.int64), world.signals(1, torch.int64)
    sums, out = torch.zeros(TILE.value), torch.zeros(TILE.value)
    kernel[(2,)](world.arg, source, box, announced, summed, sums, out)
    return out
