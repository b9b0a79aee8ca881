"""The emulator's form of the primitives: opaque operations, which weft.emulator gives a meaning.

Everything static is in an operation's symbol (symbols.py), after ":" and separated by ".", operands
are traced values. Of Triton's own atomics the emulator knows what they mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import addressing, clock, one_sided, ordered, packets, signals
from weft.language import triton_api as api
from weft.language.portable.packets import pack, unpack
from weft.language.registry import implement


def _emit(semantic, symbol, operands, dtype, shape=()):
    return api.extern(semantic, api.unwrap(symbol), operands, dtype, [api.unwrap(n) for n in shape])


@api.builtin
def same_as_first(symbol, first, *rest, _semantic=None):
    """An operation whose result has the type and shape of its first operand."""
    return _emit(_semantic, symbol, [first, *rest], first.dtype, first.shape)


@api.builtin
def elements_of(symbol, ptr, *rest, _semantic=None):
    """An operation on a (tile of) pointer(s) that results in what they point to."""
    return _emit(_semantic, symbol, [ptr, *rest], ptr.dtype.element_ty, ptr.shape)


@api.builtin
def scalar(symbol, *operands, dtype=api.INT32, _semantic=None):
    """An operation that results in one number."""
    return _emit(_semantic, symbol, operands, api.unwrap(dtype))


# ---------------------------------------------------------------------------------------------
# Addresses of peers, checked


@implement(addressing.at, "emu")
@triton.jit
def at(world, ptr, peer):
    return same_as_first("weft.at", ptr, world.table, peer)


@implement(addressing.translate, "emu")
@triton.jit
def translate(world, ptr, peer):
    return same_as_first("weft.translate", ptr, world.table, peer)


# ---------------------------------------------------------------------------------------------
# Signals


@implement(signals.notify, "emu")
@triton.jit
def notify(world, signal, value, to, op, order, scope):
    scalar(f"weft.notify:{op}.{order}.{scope}", translate(world, signal, to), value)


@implement(signals.wait, "emu")
@triton.jit
def wait(signal, at_least, count, world, order, scope, site):
    if world is None:
        scalar(f"weft.wait:{order}.{scope}", signal, at_least, count)
    else:
        scalar(f"weft.wait_bounded:{order}.{scope}", signal, at_least, count, world.table)


@implement(signals.test, "emu")
@triton.jit
def test(signal, at_least, count, order, scope):
    return scalar(f"weft.test:{order}.{scope}", signal, at_least, count, dtype=tl.int1)


@implement(signals.complete_stores, "emu")
@triton.jit
def complete_stores():
    scalar("weft.complete_stores")


# ---------------------------------------------------------------------------------------------
# Loads, stores and atomics with an order


@triton.jit
def before(order: tl.constexpr):
    if (order == "release") | (order == "acq_rel"):
        complete_stores()


@implement(ordered.load, "emu")
@triton.jit
def load(ptr, order, scope):
    return elements_of(f"weft.load:{order}.{scope}", ptr)


@implement(ordered.store, "emu")
@triton.jit
def store(ptr, value, order, scope):
    before(order)
    scalar(f"weft.store:{order}.{scope}", ptr, value)


@implement(ordered.atomic_add, "emu")
@triton.jit
def atomic_add(ptr, value, order, scope):
    before(order)
    return tl.atomic_add(ptr, value, sem=order, scope=scope)


@implement(ordered.atomic_exchange, "emu")
@triton.jit
def atomic_exchange(ptr, value, order, scope):
    before(order)
    return tl.atomic_xchg(ptr, value, sem=order, scope=scope)


@implement(ordered.atomic_cas, "emu")
@triton.jit
def atomic_cas(ptr, compare, value, order, scope):
    before(order)
    return tl.atomic_cas(ptr, compare, value, sem=order, scope=scope)


# ---------------------------------------------------------------------------------------------
# The order of transfers


@implement(one_sided.fence, "emu")
@triton.jit
def fence(world):
    scalar("weft.fence")


# ---------------------------------------------------------------------------------------------
# Packets


@implement(packets.put_packets, "emu")
@triton.jit
def put_packets(world, dst, src, flag, to, mask):
    words = translate(world, dst, to)
    packets = pack(dst, src, flag, mask)
    if mask is None:
        elements_of("weft.put_packets", words, packets)
    else:
        elements_of("weft.put_packets", words, packets, mask)


@implement(packets.wait_packets, "emu")
@triton.jit
def wait_packets(packets, flag, world, mask, dtype, site):
    if mask is None:
        return unpack(elements_of("weft.wait_packets", packets, flag), mask, dtype)
    else:
        return unpack(elements_of("weft.wait_packets", packets, flag, mask), mask, dtype)


# ---------------------------------------------------------------------------------------------
# Simulated time, or a count


@implement(clock.clock_ns, "emu")
@triton.jit
def clock_ns():
    return scalar("weft.clock_ns", dtype=tl.int64)
