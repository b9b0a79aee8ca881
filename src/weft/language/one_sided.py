"""Declarations: data moved to or from another rank, near or far, without its taking part."""

from __future__ import annotations

import triton.language as tl

from weft.base.vocabulary import Scope, SignalOp
from weft.language.operands import Number, Values
from weft.language.registry import declare
from weft.language.world_arg import WorldArg


@declare()
def put(
    world: WorldArg, dst: tl.tensor, src: Values, *, to: Number, mask: tl.tensor | None = None
) -> None:
    """Write `src` to the symmetric object `dst` on rank `to`.

        dst@to  <-  src             where mask holds

    Far ranks are reached on the emulator and, through NVSHMEM, on NVIDIA GPUs.

    Shapes  dst: a (tile of) pointer(s) to the object here; src: values, or pointers to them, of
            a shape that broadcasts to dst's
    Dtypes  values are converted to what dst points to; pointers must point to the same
    Sync    none: visible on `to` once a notify or put_signal of this program was seen there
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    stores of this program, 128 bits wide where the tile is contiguous. To a far rank: a
            copy to registered memory, then a block transfer for each row of the tile whose elements
            lie one behind another; else a transfer for each element
    Source  OpenSHMEM shmem_put; Iris put; TileLink tile_push_data
    """


@declare()
def get(
    world: WorldArg,
    dst: tl.tensor,
    src: tl.tensor,
    *,
    source: Number,
    mask: tl.tensor | None = None,
) -> None:
    """Read the symmetric object `src` of rank `source` into `dst`.

        dst  <-  src@source         where mask holds

    Far ranks are reached on the emulator and, through NVSHMEM, on NVIDIA GPUs.

    Shapes  src: a (tile of) pointer(s) to the object here; dst: pointers of the same shape
    Dtypes  values are converted to what dst points to
    Sync    reads what a wait of this program has made visible
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    remote loads, each a round trip; put is faster where either would do. From a far rank
            as put
    Source  OpenSHMEM shmem_get; Iris get; TileLink tile_pull_data
    """


@declare()
def put_signal(
    world: WorldArg,
    dst: tl.tensor,
    src: Values,
    signal: tl.tensor,
    value: Values = 1,
    *,
    to: Number,
    op: SignalOp | str = SignalOp.SET,
    mask: tl.tensor | None = None,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Write `src` to `dst` on rank `to`, then change `signal` there.

        dst@to     <-  src          where mask holds
        signal@to  <-  value        (op=SET; ADD adds), no earlier than the data

    Far ranks are reached on the emulator and, through NVSHMEM, on NVIDIA GPUs.

    Shapes  dst, src, mask: as put; signal: a scalar pointer
    Dtypes  as put and notify
    Sync    pairs with wait(ACQUIRE); releases all earlier writes of this program, as notify
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    put and notify
    Source  OpenSHMEM shmem_put_signal; NVSHMEM nvshmemx_putmem_signal_block
    """


@declare()
def fence(world: WorldArg) -> None:
    """Order this program's puts: those before come before those after.

    For each peer: whoever sees a signal sent after the fence, RELAXED ones included, sees what
    was put before it.

    Sync    a system-wide release fence by the program; contains the block barrier
    Cost    a block barrier and one fence: waits for this program's stores to be on their way
    Source  OpenSHMEM shmem_fence, shmem_quiet; PTX ISA fence.acq_rel.sys
    """
