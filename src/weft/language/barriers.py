"""Declarations: barriers over a world, and over the programs of one launch."""

from __future__ import annotations

import triton.language as tl

from weft.language.operands import Number
from weft.language.registry import declare
from weft.language.world_arg import WorldArg


@declare()
def barrier(world: WorldArg, channel: Number = 0) -> None:
    """Wait until one program of every rank has come here on `channel`.

        arrivals@p  <-  arrivals@p + 1   for every rank p;   wait: arrivals >= calls * num_ranks

    Shapes  channel: a scalar, 0 to 63; every rank calls it from one program per channel, and as
            often as the others
    Sync    all writes before it, by the calling programs, are visible to the others after it.
            It says nothing about other programs of the launch: see barrier_grid
    Raises  UsageError: no such channel
    Cost    num_ranks remote atomics and one wait, bounded by the world's timeout
    Source  OpenSHMEM shmem_barrier_all
    """


@declare()
def barrier_grid(counter: tl.tensor, *, world: WorldArg | None = None) -> None:
    """Wait until every program of this launch has come here.

        counter  <-  counter + (program 0: 2**31 - (n - 1); others: 1);   wait for the top bit

    The counter is ready for the next barrier at once, also of another launch of any size.

    Shapes  counter: a scalar pointer to one local word, zeroed once, used by one launch at a time
    Dtypes  int32
    Sync    all writes before it, by any program of the launch, are visible to all after it, on
            this device
    Raises  ResidencyError: the launch is not cooperative (host)
    Cost    one device-scoped atomic and one wait per program; bounded where a world is given, or
            found among the arguments of the device function that calls
    Source  CUDA cooperative groups, grid.sync
    """
