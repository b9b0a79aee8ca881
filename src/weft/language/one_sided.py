"""Declarations: data moved to or from another rank, near or far, without its taking part."""

from __future__ import annotations

import triton.language as tl

from weft.base.vocabulary import Scope, SignalOp
from weft.language import triton_api as api
from weft.language.operands import Number, Values
from weft.language.registry import Effects, declare
from weft.language.world_arg import WorldArg


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("dst",), peer="to"))
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


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("src",), peer="source"))
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


@declare(
    Effects(
        reads=("world", "src"),
        writes=("dst", "signal"),
        remote=("dst", "signal"),
        peer="to",
        releases=True,
    )
)
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


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("dst",), peer="to"))
def put_nbi(
    world: WorldArg, dst: tl.tensor, src: Values, *, to: Number, mask: tl.tensor | None = None
) -> None:
    """As `put`, but under way until `quiet`: until then `src` may not be overwritten.

        dst@to  <-  src             where mask holds, at some time before quiet returns

    Shapes  as put
    Dtypes  as put
    Sync    not covered by notify alone: first `fence` (then a later notify of this program comes
            behind it) or `quiet` (then it is complete). Nothing orders two of them
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    as put, which blocks for nothing between near ranks
    Source  OpenSHMEM shmem_put_nbi
    """


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("src",), peer="source"))
def get_nbi(
    world: WorldArg,
    dst: tl.tensor,
    src: tl.tensor,
    *,
    source: Number,
    mask: tl.tensor | None = None,
) -> None:
    """As `get`, but under way until `quiet`: until then `dst` may not be read.

        dst  <-  src@source         where mask holds, at some time before quiet returns

    Shapes  as get
    Dtypes  as get
    Sync    complete after `quiet`
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    as get between near ranks: the loads of several may be under way together
    Source  OpenSHMEM shmem_get_nbi
    """


@declare(Effects(reads=("world",), releases=True))
def fence(world: WorldArg) -> None:
    """Order this program's puts, blocking or not: those before come before those after.

    For each peer: whoever sees a signal sent after the fence, RELAXED ones included, sees what
    was put before it. `src` of a put_nbi is still in use: see quiet.

    Sync    a system-wide release fence by the program; contains the block barrier
    Cost    a block barrier and one fence: waits for this program's stores to be on their way
    Source  OpenSHMEM shmem_fence; PTX ISA fence.acq_rel.sys
    """


@declare(Effects(reads=("world",), releases=True))
def quiet(world: WorldArg) -> None:
    """Wait until all puts and gets of this program are complete.

    Then sources may be overwritten, what was got may be read, and signals sent later, RELAXED
    ones included, come behind the data.

    Sync    as fence; and what put_nbi and get_nbi do lies in the program's past
    Cost    a block barrier and one fence: a round trip to the slowest peer
    Source  OpenSHMEM shmem_quiet; PTX ISA fence.sc.sys
    """


@declare(
    Effects(reads=("world",), writes=("signal",), remote=("signal",), peer="to", releases=True)
)
def notify_warp(
    world: WorldArg,
    signal: tl.tensor,
    value: Values = 1,
    *,
    to: Number,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Each warp of this program adds to `signal` on rank `to` once its own writes are visible.

        for each of the program's num_warps() warps:   signal@to  <-  signal@to + value

    No warp waits for another, where notify has a block barrier. Which part of a tile a warp has
    written is the compiler's matter, so only all arrivals together say something.

    Shapes  signal: a scalar pointer to one element of a signal array on the symmetric heap
    Dtypes  as notify
    Sync    pairs with wait(at_least=all arrivals, value * num_warps() for each sender): then what
            this program wrote before is visible. Fewer arrivals order nothing. Completes
            asynchronous (TMA) stores
    Raises  NotSymmetricError, PeerError: as notify
    Cost    a remote atomic for each warp; no barrier
    Source  PTX ISA bar.warp.sync, red.release.sys; NVSHMEM nvshmemx_signal_op
    """


@declare(
    Effects(
        reads=("world", "src"),
        writes=("dst", "signal"),
        remote=("dst", "signal"),
        peer="to",
        releases=True,
    )
)
def put_signal_warp(
    world: WorldArg,
    dst: tl.tensor,
    src: Values,
    signal: tl.tensor,
    value: Values = 1,
    *,
    to: Number,
    mask: tl.tensor | None = None,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Write `src` to `dst` on rank `to`; each warp signals as soon as its part is written.

        dst@to  <-  src                                         where mask holds
        for each warp:   signal@to  <-  signal@to + value       no earlier than its part of the data

    A `put` needs no form for warps: it has no barrier.

    Shapes  dst, src, mask: as put; signal: a scalar pointer
    Dtypes  as put and notify
    Sync    as notify_warp: the receiver waits for value * num_warps()
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    put and notify_warp
    Source  NVSHMEM nvshmemx_putmem_signal_warp
    """


@declare(evaluate=lambda _, semantic: api.constexpr(api.num_warps(semantic)))
def num_warps() -> int:
    """How many warps a program of this launch has: a compile-time constant.

    Of a launch whose warps are not specialised.

    Cost    nothing
    Source  PTX ISA %ntid / 32
    """
