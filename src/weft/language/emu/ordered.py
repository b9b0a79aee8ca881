"""Emulator: loads and stores with an order, and Triton's own atomics, which it understands."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import ordered as declared
from weft.language.emu.extern import element_of, token
from weft.language.registry import implement
from weft.language.signals import complete_stores


@triton.jit
def before(order: tl.constexpr):
    if (order == "release") | (order == "acq_rel"):
        complete_stores()


@implement(declared.load, "emu")
@triton.jit
def load(ptr, order, scope):
    return element_of(f"weft.load:{order}.{scope}", ptr)


@implement(declared.store, "emu")
@triton.jit
def store(ptr, value, order, scope):
    before(order)
    token(f"weft.store:{order}.{scope}", ptr, value)


@implement(declared.atomic_add, "emu")
@triton.jit
def atomic_add(ptr, value, order, scope):
    before(order)
    return tl.atomic_add(ptr, value, sem=order, scope=scope)


@implement(declared.atomic_exchange, "emu")
@triton.jit
def atomic_exchange(ptr, value, order, scope):
    before(order)
    return tl.atomic_xchg(ptr, value, sem=order, scope=scope)


@implement(declared.atomic_cas, "emu")
@triton.jit
def atomic_cas(ptr, compare, value, order, scope):
    before(order)
    return tl.atomic_cas(ptr, compare, value, sem=order, scope=scope)
