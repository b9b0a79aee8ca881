"""Declarations: data moved to or from another rank, near or far, without its taking part."""

from __future__ import annotations

from weft.base.vocabulary import Scope, SignalOp
from weft.language.registry import Effects, declare


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("dst",), peer="to"))
def put(world, dst, src, *, to, mask=None):
    """Write `src` to the symmetric object `dst` on rank `to`.

        dst@to  <-  src             where mask holds

    Far ranks are reached on the emulator; on GPUs this version reaches near ranks.

    Shapes  dst: a (tile of) pointer(s) to the object here; src: values, or pointers to them, of
            a shape that broadcasts to dst's
    Dtypes  values are converted to what dst points to; pointers must point to the same
    Sync    none: visible on `to` once a notify or put_signal of this program was seen there
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    stores of this program, 128 bits wide where the tile is contiguous
    Source  OpenSHMEM shmem_put; Iris put; TileLink tile_push_data
    """


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("src",), peer="source"))
def get(world, dst, src, *, source, mask=None):
    """Read the symmetric object `src` of rank `source` into `dst`.

        dst  <-  src@source         where mask holds

    Far ranks are reached on the emulator; on GPUs this version reaches near ranks.

    Shapes  src: a (tile of) pointer(s) to the object here; dst: pointers of the same shape
    Dtypes  values are converted to what dst points to
    Sync    reads what a wait of this program has made visible
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    remote loads, each a round trip; put is faster where either would do
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
    world, dst, src, signal, value=1, *, to, op=SignalOp.SET, mask=None, scope=Scope.SYSTEM
):
    """Write `src` to `dst` on rank `to`, then change `signal` there.

        dst@to     <-  src          where mask holds
        signal@to  <-  value        (op=SET; ADD adds), no earlier than the data

    Far ranks are reached on the emulator; on GPUs this version reaches near ranks.

    Shapes  dst, src, mask: as put; signal: a scalar pointer
    Dtypes  as put and notify
    Sync    pairs with wait(ACQUIRE); releases all earlier writes of this program, as notify
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    put and notify
    Source  OpenSHMEM shmem_put_signal; NVSHMEM nvshmemx_putmem_signal_block
    """


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("dst",), peer="to"))
def put_nbi(world, dst, src, *, to, mask=None):
    """As `put`, but under way until `quiet`: until then `src` may not be overwritten.

        dst@to  <-  src             where mask holds, at some time before quiet returns

    Shapes  as put
    Dtypes  as put
    Sync    not covered by notify alone: first `fence` (then a later notify of this program comes
            behind it) or `quiet` (then it is complete). Nothing orders two of them
    Raises  NotSymmetricError, PeerError: as `at`
    Cost    as put between near ranks, whose stores never block
    Source  OpenSHMEM shmem_put_nbi
    """


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("src",), peer="source"))
def get_nbi(world, dst, src, *, source, mask=None):
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
def fence(world):
    """Order this program's puts, blocking or not: those before come before those after.

    For each peer: whoever sees a signal sent after the fence, RELAXED ones included, sees what
    was put before it. `src` of a put_nbi is still in use: see quiet.

    Sync    a system-wide release fence by the program; contains the block barrier
    Cost    a block barrier and one fence: waits for this program's stores to be on their way
    Source  OpenSHMEM shmem_fence; PTX ISA fence.acq_rel.sys
    """


@declare(Effects(reads=("world",), releases=True))
def quiet(world):
    """Wait until all puts and gets of this program are complete.

    Then sources may be overwritten, what was got may be read, and signals sent later, RELAXED
    ones included, come behind the data.

    Sync    as fence; and what put_nbi and get_nbi do lies in the program's past
    Cost    a block barrier and one fence: a round trip to the slowest peer
    Source  OpenSHMEM shmem_quiet; PTX ISA fence.sc.sys
    """


@declare(Effects(reads=("world", "src"), writes=("dst",), remote=("dst",), peer="to"))
def put_warp(world, dst, src, *, to, mask=None):
    """As `put`, made by one warp of the program.

    Cost    as put
    Source  NVSHMEM nvshmemx_putmem_warp
    """


@declare()
def warp():
    """The number of the calling warp within its program.

    Cost    none
    Source  PTX ISA %warpid
    """
