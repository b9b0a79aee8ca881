"""GPUs: loads, stores and atomics with an order: Triton's atomics, and the block barriers that
they lack. What a target needs besides is in its complete_stores and order_async_proxy."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import ordered as declared
from weft.language.registry import gap, implement
from weft.language.signals import complete_stores, order_async_proxy
from weft.language.triton_api import ordered_store

gap(
    declared.atomic_cas,
    "hip",
    "Triton's AMD back end ignores the order and scope of atomic_cas; "
    "use atomic_add or atomic_exchange",
)


@triton.jit
def before(order: tl.constexpr):
    if (order == "release") | (order == "acq_rel"):
        complete_stores()
        tl.debug_barrier()


@triton.jit
def after(order: tl.constexpr):
    if (order == "acquire") | (order == "acq_rel"):
        tl.debug_barrier()
        order_async_proxy()


@triton.jit
def as_integers(ptr):
    """The same words as integers: exchange and add of 0 are then exact for any type."""
    if ptr.dtype.element_ty.primitive_bitwidth == 32:
        return ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return ptr.to(tl.pointer_type(tl.int64), bitcast=True)


@implement(declared.load, "cuda", "hip")
@triton.jit
def load(ptr, order, scope):
    # An atomic that adds 0 becomes one thread's load, broadcast: one value for all threads.
    seen = tl.atomic_add(as_integers(ptr), 0, sem=order, scope=scope)
    after(order)
    return seen.to(ptr.dtype.element_ty, bitcast=True)


@implement(declared.store, "cuda")
@triton.jit
def store(ptr, value, order, scope):
    words = as_integers(ptr)
    before(order)
    ordered_store(words, value.to(words.dtype.element_ty, bitcast=True), order, scope)


@implement(declared.atomic_add, "cuda", "hip")
@triton.jit
def atomic_add(ptr, value, order, scope):
    before(order)
    old = tl.atomic_add(ptr, value, sem=order, scope=scope)
    after(order)
    return old


@implement(declared.atomic_exchange, "cuda", "hip")
@triton.jit
def atomic_exchange(ptr, value, order, scope):
    before(order)
    old = tl.atomic_xchg(ptr, value, sem=order, scope=scope)
    after(order)
    return old


@implement(declared.atomic_cas, "cuda")
@triton.jit
def atomic_cas(ptr, compare, value, order, scope):
    before(order)
    old = tl.atomic_cas(ptr, compare, value, sem=order, scope=scope)
    after(order)
    return old
