"""A tile is announced late, behind a wait for another program's part of the next tile; that
program needs what the peer announces as late.

Met in  a GEMM for Hopper with own tiles first and split tiles last, found by a hang on GPUs
Found   the wait for the sums, and that what would end it waits for the peer
"""

from gluon_pieces import (
    a_stage,
    emit_own,
    lanes,
    launch,
    leave_part,
    load_peers_tile,
    wait_for_part,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl

FOUND = "deadlock"
SAYS = "partition 0"


@gluon.jit
def multiply(world, box, announced, stage, full, summed, sums, out):
    if gl.program_id(0) == 0:
        emit_own(world, box)
        wait_for_part(world, summed)  # BUG: the own tile is announced behind it
        wl.notify(world, announced, to=1 - wl.rank(world))
        gl.store(out + lanes(), gl.load(sums + lanes()))
    else:
        leave_part(stage, full, sums, summed)


@gluon.jit
def share_a_tile(world, source, box, announced, summed, sums, out):
    stage, full = a_stage(source)
    gl.warp_specialize(
        [
            (multiply, (world, box, announced, stage, full, summed, sums, out)),
            (load_peers_tile, (world, source, announced, stage, full)),
        ],
        [1],
        [40],
    )


def main(world):
    launch(world, share_a_tile)
