"""Arithmetic of single words: what atomics and signals do to them."""

from __future__ import annotations

import numpy as np

from weft.base.vocabulary import Order, Scope

# A signal word of copy engines, streams and packets.
WORD = np.dtype(np.int64)

ORDERS = {order.value: order for order in Order}
SCOPES = {scope.value: scope for scope in Scope}


def behind(seen, expected, kind: np.dtype) -> bool:
    """Is `seen` before `expected`, modularly: signed(seen - expected) < 0?"""
    return int(wrap_add(seen, -int(expected), kind)) < 0


def wrap_add(old, value, dtype: np.dtype):
    if dtype.kind not in "iu":
        return dtype.type(old + value)
    bits = dtype.itemsize * 8
    total = (int(old) + int(value)) & ((1 << bits) - 1)
    if dtype.kind == "i" and total >> (bits - 1):
        total -= 1 << bits
    return dtype.type(total)


def _unsigned(function):
    def apply(old, value):
        kind = np.dtype(f"u{old.itemsize}")
        return function(old.view(kind), value.view(kind)).view(old.dtype)

    return apply


# What atomics make of words and their operands, by scalars and by tiles.
RMW = {
    "add": np.add,
    "fadd": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
    "umax": _unsigned(np.maximum),
    "umin": _unsigned(np.minimum),
    "exch": lambda old, value: value,
}
