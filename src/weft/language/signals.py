"""Declarations: signals, by which a program announces to others that something has happened."""

from __future__ import annotations

import triton.language as tl

from weft.base.vocabulary import Order, Scope, SignalOp
from weft.language.operands import Number, Values
from weft.language.registry import declare
from weft.language.world_arg import WorldArg


@declare(orders=(Order.RELEASE, Order.RELAXED))
def notify(
    world: WorldArg,
    signal: tl.tensor,
    value: Values = 1,
    *,
    to: Number,
    op: SignalOp | str = SignalOp.ADD,
    order: Order | str = Order.RELEASE,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Change `signal` on rank `to` once this program's earlier writes are visible there.

        signal@to  <-  signal@to + value        (op=ADD; SET stores)

    Shapes  signal: a scalar pointer to one element of a signal array on the symmetric heap
    Dtypes  int32 or int64 words; value is converted to the word's type
    Units   value counts arrivals, not bytes
    Sync    pairs with wait(ACQUIRE); called by the program, not by each thread: it contains the
            block barrier and completes asynchronous (TMA) stores. order=RELAXED orders nothing:
            the signal may overtake the data
    Raises  NotSymmetricError: signal is not on the heap (emulator)
            PeerError: to is outside 0 .. num_ranks - 1 (when traced; at run time on the emulator)
    Cost    a block barrier and one remote atomic; nothing remote is waited for
    Source  PTX ISA red.release.sys; OpenSHMEM shmem_signal_add, shmem_signal_set; dl.notify
    """


@declare(orders=(Order.RELEASE, Order.RELAXED))
def notify_all(
    world: WorldArg,
    signal: tl.tensor,
    value: Values = 1,
    *,
    op: SignalOp | str = SignalOp.ADD,
    order: Order | str = Order.RELEASE,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Change `signal` on every rank, also this one, as `notify` would.

        for p in 0 .. num_ranks - 1:   signal@p  <-  signal@p + value        (op=ADD; SET stores)

    Shapes  signal: a scalar pointer to one element of a signal array on the symmetric heap
    Dtypes  int32 or int64 words; value is converted to the word's type
    Sync    as notify; in no particular order among ranks
    Raises  NotSymmetricError: signal is not on the heap (emulator)
    Cost    one block barrier and one fence, then a remote atomic per rank, none of which waits
            for another: cheaper than as many calls of notify
    Source  PTX ISA fence.acq_rel.sys
    """


@declare(orders=(Order.ACQUIRE, Order.RELAXED), needs_site=True)
def wait(
    signal: tl.tensor,
    at_least: Number,
    count: Number = 1,
    *,
    world: WorldArg | None = None,
    order: Order | str = Order.ACQUIRE,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Wait until each of `count` local words from `signal` on has reached `at_least`.

        for i in 0 .. count - 1:   signed(signal[i] - at_least) >= 0

    The comparison is modular: counters may wrap around.

    A wait is bounded when it has the world, given as `world` or found among the arguments of the
    device function that calls: it ends after the world's timeout (10 s by default), or once
    another wait of the world has. It then falls through, and data is undefined until the host
    raises. A wait without a world has no end.

    Shapes  signal: a scalar pointer to the first word; count: a scalar
    Dtypes  int32 or int64 words; at_least is converted to the word's type
    Sync    pairs with notify(RELEASE) of the same scope or wider: what the notifier wrote before
            is visible to all loads of this program after the wait, and none of them moves before
            it. order=RELAXED promises neither
    Raises  TimeoutError: a bounded wait gave up (host, at its next call)
    Cost    polls by all threads from the local memory; then a block barrier
    Source  PTX ISA ld.acquire.sys; OpenSHMEM shmem_signal_wait_until(SHMEM_CMP_GE); dl.wait
    """


@declare(orders=(Order.ACQUIRE, Order.RELAXED))
def test(
    signal: tl.tensor,
    at_least: Number,
    count: Number = 1,
    *,
    order: Order | str = Order.ACQUIRE,
    scope: Scope | str = Scope.SYSTEM,
) -> tl.tensor:
    """Have all `count` local words from `signal` on reached `at_least`? Looks once.

        test(...)  =  all(signed(signal[i] - at_least) >= 0  for i in 0 .. count - 1)

    Shapes  signal: a scalar pointer to the first word; count: a scalar
    Dtypes  int32 or int64 words; the result is one boolean, the same for the whole program
    Sync    where it says True, as wait; where it says False, nothing is ordered
    Cost    one load and a block barrier per word
    Source  OpenSHMEM shmem_signal_fetch, shmem_test
    """


@declare()
def complete_stores() -> None:
    """Wait until the asynchronous (TMA) stores of this program have been written.

    Contained in notify, put_signal, barriers and releasing accesses; of use before releases made
    with plain `tl.atomic_*`.

    Sync    each thread completes what it has issued; contains no block barrier
    Cost    nothing where nothing is in flight; no instruction below sm_90
    Source  PTX ISA cp.async.bulk.wait_group, fence.proxy.async
    """


@declare(public=False)
def order_async_proxy() -> None:
    """What this thread has acquired also holds for the TMA loads that it issues.

    Contained in waits and acquiring accesses.

    Cost    one instruction from sm_90 on, none elsewhere
    Source  PTX ISA fence.proxy.async
    """
