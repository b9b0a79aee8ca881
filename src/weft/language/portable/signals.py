"""GPUs: what is the same of signals on all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import signals as declared
from weft.language.registry import implement
from weft.language.signals import order_async_proxy


@triton.jit
def missing(seen, at_least):
    """Is the word still behind? Modular; wraps on purpose, also in debug builds."""
    return tl.sub(seen, at_least, sanitize_overflow=False) < 0


@implement(declared.test, "cuda", "hip")
@triton.jit
def test(signal, at_least, count, order, scope):
    # An atomic that adds 0 becomes one thread's load, broadcast: one answer for all threads.
    reached = tl.cast(1, tl.int1)
    for i in range(count):
        reached &= ~missing(tl.atomic_add(signal + i, 0, sem=order, scope=scope), at_least)
    tl.debug_barrier()
    if order == "acquire":
        order_async_proxy()
    return reached


@implement(declared.consume, "cuda", "hip")
@triton.jit
def consume(value, token):
    return value
