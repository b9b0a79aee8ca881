"""Declarations: loads, stores and atomics of words, with an order and a scope."""

from __future__ import annotations

import triton.language as tl

from weft.base.vocabulary import Order, Scope
from weft.language.operands import Number, Values
from weft.language.registry import declare


@declare(orders=(Order.RELAXED, Order.ACQUIRE), kinds={"ptr": "word"})
def load(
    ptr: tl.tensor, *, order: Order | str = Order.RELAXED, scope: Scope | str = Scope.SYSTEM
) -> tl.tensor:
    """The word at `ptr`, read once, from where programs of `scope` meet.

    Shapes  ptr: a scalar pointer, local or from `at`
    Dtypes  32 or 64 bits
    Sync    ACQUIRE: later accesses of this program stay behind it. All threads of the program
            get the same value, so it may steer control flow
    Cost    one load by one thread and a block barrier
    Source  PTX ISA ld.relaxed, ld.acquire
    """


@declare(orders=(Order.RELAXED, Order.RELEASE), kinds={"ptr": "word"})
def store(
    ptr: tl.tensor,
    value: Values,
    *,
    order: Order | str = Order.RELAXED,
    scope: Scope | str = Scope.SYSTEM,
) -> None:
    """Write one word, once for the program.

        ptr[0]  <-  value

    Shapes  ptr: a scalar pointer, local or from `at`; value: a scalar
    Dtypes  32 or 64 bits; value is converted to the word's type
    Sync    RELEASE: this program's earlier writes are visible first, as in notify
    Cost    one atomic exchange; with RELEASE also a block barrier
    Source  PTX ISA st.relaxed, st.release
    """


@declare(kinds={"ptr": "words"})
def atomic_add(
    ptr: tl.tensor,
    value: Values,
    *,
    order: Order | str = Order.ACQ_REL,
    scope: Scope | str = Scope.SYSTEM,
) -> tl.tensor:
    """Add to a word in one step; the result is what it held before.

        old = ptr[0];   ptr[0]  <-  old + value

    Shapes  ptr: a scalar pointer or a tile of pointers, local or from `at`; value broadcasts
    Dtypes  32 or 64 bits
    Sync    releasing orders complete this program's earlier writes, as notify; acquiring orders
            keep later accesses behind it, as wait
    Cost    one atomic per word; a block barrier before when releasing, after when acquiring
    Source  PTX ISA atom.add; OpenSHMEM shmem_atomic_fetch_add
    """


@declare(kinds={"ptr": "words"})
def atomic_exchange(
    ptr: tl.tensor,
    value: Values,
    *,
    order: Order | str = Order.ACQ_REL,
    scope: Scope | str = Scope.SYSTEM,
) -> tl.tensor:
    """Replace a word in one step; the result is what it held before.

        old = ptr[0];   ptr[0]  <-  value

    Shapes  ptr: a scalar pointer or a tile of pointers, local or from `at`; value broadcasts
    Dtypes  32 or 64 bits
    Sync    as atomic_add
    Cost    as atomic_add
    Source  PTX ISA atom.exch; OpenSHMEM shmem_atomic_swap
    """


@declare(kinds={"ptr": "words"})
def atomic_cas(
    ptr: tl.tensor,
    compare: Number,
    value: Values,
    *,
    order: Order | str = Order.ACQ_REL,
    scope: Scope | str = Scope.SYSTEM,
) -> tl.tensor:
    """Replace a word if it holds `compare`, in one step; the result is what it held before.

        old = ptr[0];   if old == compare:  ptr[0]  <-  value

    Shapes  ptr: a scalar pointer or a tile of pointers, local or from `at`; others broadcast
    Dtypes  32 or 64 bits
    Sync    as atomic_add
    Cost    as atomic_add
    Source  PTX ISA atom.cas; OpenSHMEM shmem_atomic_compare_swap
    """
